// Readings of a GPU's kernels, from Nsight Compute (ncu) where it is installed and may read the counters.
#pragma once

#include <string>
#include <vector>

#include "tools/command.h"

namespace fla::tools {

struct KernelReading {  // of one launch; NaN: not read
  std::string name, grid, block;
  double us = 0;
  double memory = 0, compute = 0, dram = 0;  // share of the peak, 0 to 1
  double occupancy = 0;                      // warps at work of those that a multiprocessor has room for
  double dram_bytes = 0;                     // read and written
  double registers = 0;                      // a thread
  double local_instructions = 0;             // loads and stores of local memory: spilled registers
  double local_bytes = 0;
  std::string stall;       // what warps waited for most, "" when not read
  double stall_share = 0;  // of the time in which they waited

  std::string text() const;
};
Json to_json(const KernelReading& k);

struct NcuReadings {
  std::string missing;                 // why there are none; empty: there are
  std::vector<KernelReading> kernels;  // in the order of the launches
};

// From what ncu has printed with --csv --page raw --print-units base.
NcuReadings parse_ncu(const std::string& output);
// Runs a command under ncu, which reads the kernels that start inside the ranges of that name (NVTX, domain fla) and
// ends with the command, at last after `timeout_s` seconds. Whatever goes wrong is said in `missing`.
NcuReadings run_ncu(const std::vector<std::string>& command, const std::string& range, int timeout_s = 300);

}  // namespace fla::tools
