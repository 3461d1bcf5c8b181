#include "fla/core/context.h"

#include <span>
#include <string>

#include "fla/core/context_core.h"
#include "fla/core/tensor.h"
#include "fla/core/text.h"
#include "fla/registry/registry.h"

namespace fla {

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

namespace detail {

namespace {

constexpr std::size_t kLogSlots = 4096;

}  // namespace

ContextCore::ContextCore(ContextOptions o)
    : options(std::move(o)),
      registry(options.registry != nullptr ? options.registry : &Registry::global()),
      status(check_options(options, *registry)),
      pool(status ? options.threads : 1, status ? std::span<const int>(options.affinity) : std::span<const int>()) {
  if (options.log) logged = std::make_unique<std::atomic<std::uintptr_t>[]>(kLogSlots);
}

void ContextCore::log_once(const void* key, int kind, const LogRecord& record) {
  if (!logged) return;
  // An open hash table of keys; a kind is a byte beside the address that the key is. When it is full, all is told again.
  const std::uintptr_t seen = reinterpret_cast<std::uintptr_t>(key) + static_cast<std::uintptr_t>(kind);
  for (std::size_t i = 0; i < kLogSlots; ++i) {
    std::atomic<std::uintptr_t>& slot = logged[(seen / 8 + seen + i) % kLogSlots];
    std::uintptr_t there = 0;
    if (slot.compare_exchange_strong(there, seen, std::memory_order_relaxed)) break;
    if (there == seen) return;
  }
  options.log(record);
}

void ContextCore::close() {
  unsigned now = users.fetch_or(kClosed, std::memory_order_acq_rel) | kClosed;
  while (now != kClosed) {
    users.wait(now, std::memory_order_acquire);
    now = users.load(std::memory_order_acquire);
  }
}

}  // namespace detail

Context::Context(ContextOptions options) : core_(new detail::ContextCore(std::move(options))) {}

Context::~Context() {
  core_->close();
  core_->release();
}

const Status& Context::status() const { return core_->status; }
const ContextOptions& Context::options() const { return core_->options; }
const Registry& Context::registry() const { return *core_->registry; }
ThreadPool& Context::pool() const { return core_->pool; }
void Context::log_once(const void* key, int kind, const LogRecord& record) const { core_->log_once(key, kind, record); }

std::string shape_string(std::span<const std::int64_t> dims) {
  std::string s = "[";
  for (std::size_t i = 0; i < dims.size(); ++i) s += (i != 0 ? "," : "") + std::to_string(dims[i]);
  return s + "]";
}

}  // namespace fla
