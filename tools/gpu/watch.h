// A GPU's clocks, temperature, power and load, before, during and after what is timed there: a time means little when
// the clock fell or somebody else was computing. Read through the driver's management library (NVML), which is opened
// when it is there; without it the record says why it has no samples.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fla::tools {

// Names the library when it is not libnvidia-ml.so.1 where the loader finds it.
inline constexpr const char* kNvmlVariable = "FLA_NVML";

struct GpuSample {
  static constexpr double kNotTold = std::numeric_limits<double>::quiet_NaN();
  double sm_mhz = kNotTold, memory_mhz = kNotTold, temperature_c = kNotTold, power_w = kNotTold;
  double utilisation = kNotTold;  // share of the driver's last sampling period in which a kernel ran
  std::uint64_t throttle = 0;     // a bit for each reason
  int processes = -1;             // that compute there, this one among them; -1: not told
};

struct GpuClocks {
  std::string missing;  // why there are no samples; empty: there are
  GpuSample before, after;
  std::vector<GpuSample> during;

  std::vector<std::string> throttled() const;  // reasons seen while it worked
  int other_processes() const;                 // the most seen at once; -1: not told
  std::string text() const;                    // one line
};
nlohmann::ordered_json to_json(const GpuClocks& c);

class GpuWatch {
 public:
  // Takes the sample before. `pci` is the device's address; this process must have used the device already.
  explicit GpuWatch(const std::string& pci, std::chrono::milliseconds every = std::chrono::milliseconds(50));
  ~GpuWatch();
  GpuWatch(const GpuWatch&) = delete;
  GpuWatch& operator=(const GpuWatch&) = delete;

  // Samples are taken while one of these lives: what is prepared between timings is not looked at.
  class During {
   public:
    explicit During(GpuWatch& w) : watch_(w) { watch_.start(); }
    ~During() { watch_.pause(); }
    During(const During&) = delete;
    During& operator=(const During&) = delete;

   private:
    GpuWatch& watch_;
  };
  GpuClocks finish();  // takes the sample after

 private:
  struct Impl;
  void start();
  void pause();
  std::unique_ptr<Impl> impl_;
};

}  // namespace fla::tools
