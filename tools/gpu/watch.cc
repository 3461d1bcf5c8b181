#include "tools/gpu/watch.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "fmt/format.h"

namespace fla::tools {
namespace {

using Json = nlohmann::ordered_json;

// What is needed of NVML's interface, which is stable; its header is not part of every toolkit.
using NvmlDevice = void*;
struct NvmlUtilization {
  unsigned gpu, memory;  // per cent
};
constexpr int kSuccess = 0, kInsufficientSize = 7;
constexpr int kClockSm = 1, kClockMemory = 2;
constexpr int kSensorGpu = 0;
constexpr std::uint64_t kIdle = 1;

struct Nvml {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  const char* (*error_string)(int) = nullptr;
  int (*by_pci)(const char*, NvmlDevice*) = nullptr;
  int (*clock)(NvmlDevice, int, unsigned*) = nullptr;
  int (*temperature)(NvmlDevice, int, unsigned*) = nullptr;
  int (*power)(NvmlDevice, unsigned*) = nullptr;
  int (*utilisation)(NvmlDevice, NvmlUtilization*) = nullptr;
  int (*throttle)(NvmlDevice, unsigned long long*) = nullptr;
  int (*processes)(NvmlDevice, unsigned*, void*) = nullptr;
};

template <typename Fn>
void find(void* library, const char* name, Fn& fn) {
  fn = reinterpret_cast<Fn>(dlsym(library, name));
}

struct Reason {
  std::uint64_t bit;
  const char* name;
};
constexpr Reason kReasons[] = {{0x2, "application clocks"}, {0x4, "power cap"},         {0x8, "hardware slowdown"},
                               {0x10, "sync boost"},        {0x20, "software thermal"}, {0x40, "hardware thermal"},
                               {0x80, "power brake"},       {0x100, "display clocks"}};

std::vector<std::string> names_of(std::uint64_t bits) {
  std::vector<std::string> list;
  for (const Reason& r : kReasons) {
    if ((bits & r.bit) != 0) list.emplace_back(r.name);
    bits &= ~r.bit;
  }
  bits &= ~kIdle;
  if (bits != 0) list.push_back(fmt::format("reason {:#x}", bits));
  return list;
}

std::string joined(const std::vector<std::string>& words) { return fmt::format("{}", fmt::join(words, ", ")); }

struct Range {
  double median, least, most;
};
// Of what was told; median NaN when nothing was.
Range range_of(const std::vector<GpuSample>& samples, double GpuSample::*what) {
  std::vector<double> x;
  for (const GpuSample& s : samples)
    if (!std::isnan(s.*what)) x.push_back(s.*what);
  if (x.empty()) return {GpuSample::kNotTold, GpuSample::kNotTold, GpuSample::kNotTold};
  std::sort(x.begin(), x.end());
  return {x[x.size() / 2], x.front(), x.back()};
}

struct Quantity {
  const char* key;
  const char* name;
  const char* unit;
  double GpuSample::*value;
};
constexpr Quantity kQuantities[] = {{"sm_mhz", "SM", "MHz", &GpuSample::sm_mhz},
                                    {"memory_mhz", "memory", "MHz", &GpuSample::memory_mhz},
                                    {"temperature_c", "", "C", &GpuSample::temperature_c},
                                    {"power_w", "", "W", &GpuSample::power_w},
                                    {"utilisation", "busy", "%", &GpuSample::utilisation}};

Json number_or_null(double x) { return std::isnan(x) ? Json(nullptr) : Json(x); }

Json sample_json(const GpuSample& s) {
  Json j = Json::object();
  for (const Quantity& q : kQuantities) j[q.key] = number_or_null(s.*(q.value));
  j["throttle"] = names_of(s.throttle);
  return j;
}

}  // namespace

struct GpuWatch::Impl {
  explicit Impl(std::chrono::milliseconds every) : period(every) {}

  void* library = nullptr;
  Nvml nvml;
  NvmlDevice device = nullptr;
  bool initialised = false;
  std::chrono::milliseconds period;
  GpuClocks clocks;

  std::thread sampler;
  std::mutex mutex;
  std::condition_variable wake;
  bool stop = false;

  std::string open(const std::string& pci) {
    const char* given = std::getenv(kNvmlVariable);
    const std::string path = given != nullptr && *given != '\0' ? given : "libnvidia-ml.so.1";
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = dlerror();
      return fmt::format("NVML cannot be loaded: {}", why != nullptr ? why : path.c_str());
    }
    find(library, "nvmlInit_v2", nvml.init);
    find(library, "nvmlShutdown", nvml.shutdown);
    find(library, "nvmlErrorString", nvml.error_string);
    find(library, "nvmlDeviceGetHandleByPciBusId_v2", nvml.by_pci);
    find(library, "nvmlDeviceGetClockInfo", nvml.clock);
    find(library, "nvmlDeviceGetTemperature", nvml.temperature);
    find(library, "nvmlDeviceGetPowerUsage", nvml.power);
    find(library, "nvmlDeviceGetUtilizationRates", nvml.utilisation);
    find(library, "nvmlDeviceGetCurrentClocksEventReasons", nvml.throttle);
    if (nvml.throttle == nullptr) find(library, "nvmlDeviceGetCurrentClocksThrottleReasons", nvml.throttle);
    find(library, "nvmlDeviceGetComputeRunningProcesses_v3", nvml.processes);
    if (nvml.init == nullptr || nvml.shutdown == nullptr || nvml.error_string == nullptr || nvml.by_pci == nullptr)
      return path + " is not NVML";
    if (const int e = nvml.init(); e != kSuccess) return fmt::format("NVML does not start: {}", nvml.error_string(e));
    initialised = true;
    if (const int e = nvml.by_pci(pci.c_str(), &device); e != kSuccess)
      return fmt::format("NVML knows no device at '{}': {}", pci, nvml.error_string(e));
    return "";
  }
  void close() {
    if (initialised) nvml.shutdown();
    if (library != nullptr) dlclose(library);
    initialised = false;
    library = nullptr;
  }
  GpuSample sample() const {
    GpuSample s;
    unsigned x = 0;
    if (nvml.clock != nullptr && nvml.clock(device, kClockSm, &x) == kSuccess) s.sm_mhz = x;
    if (nvml.clock != nullptr && nvml.clock(device, kClockMemory, &x) == kSuccess) s.memory_mhz = x;
    if (nvml.temperature != nullptr && nvml.temperature(device, kSensorGpu, &x) == kSuccess) s.temperature_c = x;
    if (nvml.power != nullptr && nvml.power(device, &x) == kSuccess) s.power_w = x * 1e-3;
    if (NvmlUtilization u{}; nvml.utilisation != nullptr && nvml.utilisation(device, &u) == kSuccess)
      s.utilisation = u.gpu;
    if (unsigned long long bits = 0; nvml.throttle != nullptr && nvml.throttle(device, &bits) == kSuccess)
      s.throttle = bits;
    unsigned count = 0;  // no room for the list: only how long it is
    if (nvml.processes != nullptr)
      if (const int e = nvml.processes(device, &count, nullptr); e == kSuccess || e == kInsufficientSize)
        s.processes = static_cast<int>(count);
    return s;
  }
  void work() {
    std::unique_lock lock(mutex);
    while (!wake.wait_for(lock, period, [this] { return stop; })) clocks.during.push_back(sample());
  }
};

GpuWatch::GpuWatch(const std::string& pci, std::chrono::milliseconds every) : impl_(std::make_unique<Impl>(every)) {
  impl_->clocks.missing = impl_->open(pci);
  if (impl_->clocks.missing.empty()) impl_->clocks.before = impl_->sample();
}

GpuWatch::~GpuWatch() {
  pause();
  impl_->close();
}

void GpuWatch::start() {
  if (!impl_->clocks.missing.empty() || impl_->sampler.joinable()) return;
  impl_->stop = false;
  impl_->sampler = std::thread([this] { impl_->work(); });
}

void GpuWatch::pause() {
  if (!impl_->sampler.joinable()) return;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->wake.notify_all();
  impl_->sampler.join();
  // The clocks that the work has left, also when it was shorter than a period.
  impl_->clocks.during.push_back(impl_->sample());
}

GpuClocks GpuWatch::finish() {
  pause();
  if (impl_->clocks.missing.empty()) impl_->clocks.after = impl_->sample();
  return impl_->clocks;
}

std::vector<std::string> GpuClocks::throttled() const {
  std::uint64_t bits = 0;
  for (const GpuSample& s : during) bits |= s.throttle;
  return names_of(bits);
}

int GpuClocks::other_processes() const {
  int most = std::max(before.processes, after.processes);
  for (const GpuSample& s : during) most = std::max(most, s.processes);
  return most < 0 ? -1 : std::max(most - 1, 0);
}

std::string GpuClocks::text() const {
  if (!missing.empty()) return "not sampled (" + missing + ")";
  std::string s;
  for (const Quantity& q : kQuantities) {
    const Range r = range_of(during, q.value);
    if (std::isnan(r.median)) continue;
    const double b = before.*(q.value), a = after.*(q.value);
    s += fmt::format("{}{}{}{:.0f} {}", s.empty() ? "" : ", ", q.name, *q.name != '\0' ? " " : "", r.median, q.unit);
    if (r.least < r.most) s += fmt::format(" ({:.0f} to {:.0f})", r.least, r.most);
    if (q.value == &GpuSample::sm_mhz && !std::isnan(b) && !std::isnan(a))
      s += fmt::format(", {:.0f} before, {:.0f} after", b, a);
  }
  const auto reasons = throttled();
  s += fmt::format("; {} samples; throttled by {}", during.size(), reasons.empty() ? "nothing" : joined(reasons));
  if (const int others = other_processes(); others >= 0)
    s += fmt::format("; {} other compute processes", others == 0 ? "no" : std::to_string(others));
  return s;
}

Json to_json(const GpuClocks& c) {
  if (!c.missing.empty()) return {{"missing", c.missing}};
  Json during = {{"n", c.during.size()}};
  for (const Quantity& q : kQuantities) {
    const Range r = range_of(c.during, q.value);
    during[q.key] = {
        {"median", number_or_null(r.median)}, {"min", number_or_null(r.least)}, {"max", number_or_null(r.most)}};
  }
  during["throttle"] = c.throttled();
  const int others = c.other_processes();
  return {{"missing", nullptr},
          {"before", sample_json(c.before)},
          {"during", std::move(during)},
          {"after", sample_json(c.after)},
          {"other_processes", others < 0 ? Json(nullptr) : Json(others)}};
}

}  // namespace fla::tools
