// Readings of a GPU's kernels: a recorded output of Nsight Compute, and a script in PATH that plays the program.
#include "tools/report/ncu.h"

#include <chrono>
#include <cmath>
#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "tests/loop/fake_ncu.h"
#include "tools/compare/process.h"

namespace fla::tools {
namespace {

// Nsight Compute 2025.3.1 on an H200: chunk_gla, forward and backward, BF16, B4_T2048_H16_D128; columns left out.
std::string recorded() { return std::string(FLA_SOURCE_DIR) + "/tests/loop/data/ncu_gla_fwdbwd.csv"; }

std::string with(std::string text, const std::string& what, const std::string& by) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size())
    text.replace(at, what.size(), by);
  return text;
}

TEST(Ncu, ReadsARecordedTable) {
  const NcuReadings r = parse_ncu(read_text(recorded()));
  EXPECT_EQ(r.missing, "");
  ASSERT_EQ(r.kernels.size(), 5U);
  const KernelReading& k = r.kernels[0];
  EXPECT_EQ(k.name, "diag_channel_kernel<bf16, 128, 32, 4, 1, 2>");
  EXPECT_EQ(k.grid, "(128, 1, 1)");
  EXPECT_EQ(k.block, "(128, 1, 1)");
  EXPECT_DOUBLE_EQ(k.us, 363.68);
  EXPECT_DOUBLE_EQ(k.memory, 0.1945);
  EXPECT_DOUBLE_EQ(k.compute, 0.252);
  EXPECT_DOUBLE_EQ(k.dram, 0.1129);
  EXPECT_DOUBLE_EQ(k.occupancy, 0.0625);
  EXPECT_DOUBLE_EQ(k.dram_bytes, 167883008.0 + 29687552.0);
  EXPECT_EQ(k.registers, 218);
  EXPECT_EQ(k.local_instructions, 0);
  EXPECT_TRUE(std::isnan(k.local_bytes)) << "not in the recording";
  EXPECT_EQ(k.stall, "wait");
  EXPECT_NEAR(k.stall_share, 1.71 / (0.02 + 0.11 + 0.05 + 0.01 + 0.36 + 0.52 + 1.71), 0.01);
  EXPECT_EQ(r.kernels[4].name, "diag_gate_kernel<bf16>");
  EXPECT_EQ(k.text(),
            "memory 19 %, compute 25 %, DRAM 11 %, occupancy 6 %, top stall wait (62 %), 218 registers, no spills");
  EXPECT_TRUE(to_json(k)["local_bytes"].is_null());
  EXPECT_EQ(to_json(k)["registers"], 218);
}

TEST(Ncu, WhatWasNotReadIsNull) {
  std::string text = with(read_text(recorded()), "\"218\"", "\"n/a\"");
  text = with(text, "\"6.25\"", "\"nan\"");
  text = with(text, "dram__bytes_read.sum", "another");
  const NcuReadings r = parse_ncu(text);
  ASSERT_EQ(r.kernels.size(), 5U);
  EXPECT_TRUE(std::isnan(r.kernels[0].registers));
  EXPECT_TRUE(to_json(r.kernels[0])["occupancy"].is_null());
  EXPECT_TRUE(to_json(r.kernels[0])["dram_bytes"].is_null());
  EXPECT_EQ(r.kernels[0].text().find("registers"), std::string::npos);
  EXPECT_EQ(r.kernels[1].registers, 243);
}

TEST(Ncu, SpillsAreCounted) {
  // The instructions of the last kernel's loads: the last cell but one of its row.
  std::string text = read_text(recorded());
  text = text.substr(0, text.rfind(",\"0\",\"0\"")) + ",\"1,024\",\"512\"\n";
  text = with(text, "smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio",
              "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum");
  text = with(text, "smsp__average_warps_issue_stalled_tex_throttle_per_issue_active.ratio",
              "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum");
  const NcuReadings r = parse_ncu(text);
  ASSERT_EQ(r.kernels.size(), 5U);
  EXPECT_EQ(r.kernels[4].local_instructions, 1536);
  EXPECT_EQ(r.kernels[4].local_bytes, 0);
  EXPECT_NE(r.kernels[4].text().find("spills: 1536 instructions"), std::string::npos) << r.kernels[4].text();
}

TEST(Ncu, TellsWhyThereIsNoTable) {
  EXPECT_EQ(parse_ncu("").missing, "ncu printed no table of kernels");
  EXPECT_EQ(parse_ncu("ID,Kernel\n\x01\xff,,,\"").missing, "ncu printed no table of kernels");
  EXPECT_EQ(parse_ncu("==WARNING== No kernels were profiled.\n").missing, "ncu saw no kernel in the call's range");
  EXPECT_EQ(parse_ncu("==ERROR== The application returned an error code (1).\n").missing,
            "The application returned an error code (1).");
  EXPECT_NE(
      parse_ncu("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n").missing.find("ERR_NVGPUCTRPERM"),
      std::string::npos);
  EXPECT_EQ(parse_ncu("\"ID\",\"Kernel Name\"\n").missing, "ncu's table has no readings");
  EXPECT_EQ(parse_ncu("\"ID\",\"Kernel Name\"\n\"\",\"\"\n\"0\",\"cut o").missing, "ncu's table has no readings");
  // Cut anywhere, it is never more than what arrived.
  const std::string whole = read_text(recorded());
  for (std::size_t n = 0; n < whole.size(); n += 37) EXPECT_LE(parse_ncu(whole.substr(0, n)).kernels.size(), 5U);
}

TEST_F(FakeNcu, RunsTheCommandUnderItAndLeavesTheClocksAlone) {
  ncu("for a; do echo \"$a\"; done >" + (dir_ / "args").string() + "\ncat " + recorded());
  const NcuReadings r = run_ncu({"/opt/fla", "bench", "chunk_gla", "--once"}, "chunk_gla fwd B1_T1");
  EXPECT_EQ(r.missing, "");
  EXPECT_EQ(r.kernels.size(), 5U);
  const std::string args = read_text(dir_ / "args");
  EXPECT_EQ(args.find("--clock-control\nnone\n--nvtx\n--nvtx-include\nfla@chunk_gla fwd B1_T1/\n"), 0U) << args;
  EXPECT_TRUE(args.ends_with("/opt/fla\nbench\nchunk_gla\n--once\n")) << args;
}

TEST_F(FakeNcu, AFailureIsItsReason) {
  ncu("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters'; exit 1");
  EXPECT_NE(run_ncu({"true"}, "r").missing.find("ERR_NVGPUCTRPERM"), std::string::npos);
  ncu("echo '==ERROR== Failed to initialize the profiler: LibraryNotLoaded' >&2; exit 9");
  EXPECT_EQ(run_ncu({"true"}, "r").missing, "Failed to initialize the profiler: LibraryNotLoaded");
  ncu("echo no GPU here >&2; exit 3");
  EXPECT_EQ(run_ncu({"true"}, "r").missing, "ncu ended with status 3: no GPU here");
  ncu("head -c 100000 /dev/urandom");
  EXPECT_EQ(run_ncu({"true"}, "r").missing, "ncu printed no table of kernels");
  ncu("kill -SEGV $$");
  EXPECT_EQ(run_ncu({"true"}, "r").missing, "ncu ended with status 139: ");
}

TEST_F(FakeNcu, OneThatHangsIsEnded) {
  const auto seconds = [](auto since) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
  };
  // It does not listen to SIGTERM, and what it started holds its output too.
  for (const char* body : {"trap '' TERM; sleep 60 & sleep 60", "exec >/dev/null 2>&1; sleep 60"}) {
    ncu(body);
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(run_ncu({"true"}, "r", 1).missing, "ncu did not end within 1 s") << body;
    EXPECT_LT(seconds(begin), 20) << body;
  }
}

}  // namespace
}  // namespace fla::tools
