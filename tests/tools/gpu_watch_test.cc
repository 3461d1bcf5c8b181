// Clocks and load of a GPU, from a library that plays NVML: built for the test, named by FLA_NVML.
#include "tools/gpu/watch.h"

#include <cstdlib>
#include <string>
#include <thread>

#include "gtest/gtest.h"

namespace fla::tools {
namespace {

using namespace std::chrono_literals;

class Watch : public ::testing::Test {
 protected:
  void SetUp() override { setenv(kNvmlVariable, FLA_FAKE_NVML, 1); }
  void TearDown() override {
    unsetenv(kNvmlVariable);
    unsetenv("FAKE_NVML");
  }
  static GpuClocks watched(const std::string& plays = "", const std::string& pci = "0000:1B:00.0") {
    setenv("FAKE_NVML", plays.c_str(), 1);
    GpuWatch watch(pci, 1ms);
    {
      const GpuWatch::During during(watch);
      std::this_thread::sleep_for(50ms);
    }
    return watch.finish();
  }
};

TEST_F(Watch, SamplesBeforeDuringAndAfter) {
  const GpuClocks c = watched();
  EXPECT_EQ(c.missing, "");
  EXPECT_EQ(c.before.sm_mhz, 1900);
  EXPECT_EQ(c.after.sm_mhz, 1600);
  ASSERT_GE(c.during.size(), 3U);
  EXPECT_EQ(c.during.front().sm_mhz, 1800);
  EXPECT_EQ(c.during.back().sm_mhz, 1600);
  EXPECT_EQ(c.throttled(), (std::vector<std::string>{"power cap", "hardware thermal"}));
  EXPECT_EQ(c.other_processes(), 2) << "three compute there, one of them is this one";
  const auto j = to_json(c);
  EXPECT_TRUE(j["missing"].is_null());
  EXPECT_EQ(j["before"]["memory_mhz"], 2619);
  EXPECT_EQ(j["before"]["power_w"], 312.5);
  EXPECT_EQ(j["during"]["sm_mhz"]["min"], 1600);
  EXPECT_EQ(j["during"]["sm_mhz"]["max"], 1800);
  EXPECT_EQ(j["during"]["n"], c.during.size());
  EXPECT_EQ(j["after"]["utilisation"], 97);
  EXPECT_EQ(j["other_processes"], 2);
  for (const char* what : {"(1600 to 1800), 1900 before, 1600 after", "memory 2619 MHz", "41 C", "busy 97 %",
                           "throttled by power cap, hardware thermal", "2 other compute processes"})
    EXPECT_NE(c.text().find(what), std::string::npos) << what << ": " << c.text();
}

TEST_F(Watch, NothingIsSampledOutsideATiming) {
  GpuWatch watch("0000:1B:00.0", 1ms);
  std::this_thread::sleep_for(20ms);
  { const GpuWatch::During during(watch); }
  const auto n = watch.finish().during.size();
  EXPECT_GE(n, 1U) << "a timing shorter than a period has a sample too";
  EXPECT_LE(n, 5U);
}

TEST_F(Watch, WhatTheDeviceDoesNotTellIsNull) {
  const GpuClocks c = watched("mute");
  EXPECT_EQ(c.missing, "");
  EXPECT_EQ(c.other_processes(), -1);
  const auto j = to_json(c);
  EXPECT_TRUE(j["before"]["sm_mhz"].is_null());
  EXPECT_TRUE(j["during"]["power_w"]["median"].is_null());
  EXPECT_TRUE(j["other_processes"].is_null());
  EXPECT_NE(c.text().find("throttled by nothing"), std::string::npos);
}

TEST_F(Watch, AMissingLibraryOrDeviceIsSaid) {
  EXPECT_EQ(watched("start").missing, "NVML does not start: Driver Not Loaded");
  EXPECT_EQ(watched("device").missing, "NVML knows no device at '0000:1B:00.0': Not Found");
  setenv(kNvmlVariable, "/nonexistent/libnvidia-ml.so.1", 1);
  GpuClocks c = watched();
  EXPECT_NE(c.missing.find("NVML cannot be loaded: /nonexistent"), std::string::npos) << c.missing;
  EXPECT_TRUE(c.during.empty());
  EXPECT_NE(c.text().find("not sampled (NVML cannot be loaded"), std::string::npos) << c.text();
  EXPECT_EQ(to_json(c)["missing"], c.missing);
  setenv(kNvmlVariable, "libm.so.6", 1);
  EXPECT_EQ(watched().missing, "libm.so.6 is not NVML");
}

}  // namespace
}  // namespace fla::tools
