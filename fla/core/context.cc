#include "fla/core/context.h"

#include <mutex>
#include <set>
#include <utility>

#include "fla/core/tensor.h"
#include "fla/registry/registry.h"

namespace fla {

struct Context::LogState {
  std::mutex mutex;
  std::set<std::pair<const void*, int>> seen;
};

Context::Context(ContextOptions options)
    : options_(std::move(options)),
      registry_(options_.registry != nullptr ? options_.registry : &Registry::global()),
      pool_(options_.threads, options_.affinity),
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
