// Plays NVML: a GPU whose clock falls from sample to sample. FAKE_NVML names what goes wrong: "start", "device",
// "mute".
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {
std::atomic<unsigned> samples{0};
bool plays(const char* what) {
  const char* set = std::getenv("FAKE_NVML");
  return set != nullptr && std::strcmp(set, what) == 0;
}
constexpr int kNotSupported = 3, kNotFound = 6, kInsufficientSize = 7, kDriverNotLoaded = 9;
char device;
}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int nvmlInit_v2() { return plays("start") ? kDriverNotLoaded : 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int code) {
  return code == kDriverNotLoaded ? "Driver Not Loaded" : code == kNotFound ? "Not Found" : "?";
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* pci, void** handle) {
  if (plays("device") || *pci == '\0') return kNotFound;
  *handle = &device;
  return 0;
}
// The first sample reads 1900 MHz, later ones 1800, 1700 and then always 1600.
int nvmlDeviceGetClockInfo(void* handle, int type, unsigned* mhz) {
  if (plays("mute")) return kNotSupported;
  if (handle != &device) return kNotFound;
  if (type != 1) return *mhz = 2619, 0;
  const unsigned n = samples++;
  *mhz = 1900 - 100 * (n < 3 ? n : 3);
  return 0;
}
int nvmlDeviceGetTemperature(void*, int, unsigned* celsius) {
  if (plays("mute")) return kNotSupported;
  return *celsius = 41, 0;
}
int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatt) {
  if (plays("mute")) return kNotSupported;
  return *milliwatt = 312500, 0;
}
struct Utilization {
  unsigned gpu, memory;
};
int nvmlDeviceGetUtilizationRates(void*, Utilization* u) {
  if (plays("mute")) return kNotSupported;
  *u = {97, 40};
  return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* bits) {
  if (plays("mute")) return kNotSupported;
  return *bits = 0x4 | 0x40 | 0x1, 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
  if (plays("mute")) return kNotSupported;
  *count = 3;
  return kInsufficientSize;
}

}  // extern "C"
#pragma GCC visibility pop
