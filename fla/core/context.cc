#include "fla/core/context.h"

#include <mutex>
#include <set>
#include <utility>

#include "fla/core/tensor.h"
#include "fla/core/text.h"
#include "fla/registry/registry.h"

namespace fla {

struct Context::LogState {
  std::mutex mutex;
  std::set<std::pair<const void*, int>> seen;
};

namespace {

Status check_options(const ContextOptions& o, const Registry& registry) {
  Status s = ThreadPool::check(o.threads, o.affinity);
  if (s && !o.backend.empty()) {
    std::string known;
    bool found = false;
    for (const auto& name : registry.backends()) {
      known += (known.empty() ? "" : ", ") + name;
      found |= name == o.backend;
    }
    if (!found)
      s = {Code::InvalidArgument, "backend: expected one of " + known + ", got '" + printable(o.backend) + "'"};
  }
  return s ? s : Status(s.code(), "context: " + s.message());
}

}  // namespace

Context::Context(ContextOptions options)
    : options_(std::move(options)),
      registry_(options_.registry != nullptr ? options_.registry : &Registry::global()),
      status_(check_options(options_, *registry_)),
      pool_(status_ ? options_.threads : 1, status_ ? std::span<const int>(options_.affinity) : std::span<const int>()),
      log_state_(std::make_unique<LogState>()) {}

Context::~Context() = default;

void Context::log_once(const void* key, int kind, const LogRecord& record) const {
  if (!options_.log) return;
  {
    const std::lock_guard lock(log_state_->mutex);
    if (!log_state_->seen.emplace(key, kind).second) return;
  }
  options_.log(record);
}

std::string shape_string(std::span<const std::int64_t> dims) {
  std::string s = "[";
  for (std::size_t i = 0; i < dims.size(); ++i) s += (i != 0 ? "," : "") + std::to_string(dims[i]);
  return s + "]";
}

}  // namespace fla
