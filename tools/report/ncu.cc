#include "tools/report/ncu.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <string_view>

#include "tools/compare/process.h"

namespace fla::tools {
namespace {

namespace fs = std::filesystem;

constexpr double kNotRead = std::numeric_limits<double>::quiet_NaN();
// Beside the sections. What a GPU does not count is left out of the table.
constexpr const char* kMetrics =
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed,dram__bytes_read.sum,dram__bytes_write.sum,"
    "smsp__inst_executed_op_local_ld.sum,smsp__inst_executed_op_local_st.sum,"
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum,l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum";
constexpr std::string_view kStallPrefix = "smsp__average_warps_issue_stalled_";
constexpr std::string_view kStallSuffix = "_per_issue_active.ratio";

// Lines of one record may be several: a quoted cell holds what it likes.
std::vector<std::vector<std::string>> csv_rows(std::string_view text) {
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> row;
  std::string cell;
  bool quoted = false, any = false;
  const auto end_row = [&] {
    if (any) {
      row.push_back(std::move(cell));
      rows.push_back(std::move(row));
    }
    cell.clear();
    row.clear();
    any = false;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '"' && i + 1 < text.size() && text[i + 1] == '"')
        cell += text[++i];
      else if (c == '"')
        quoted = false;
      else
        cell += c;
    } else if (c == '"') {
      quoted = any = true;
    } else if (c == ',') {
      row.push_back(std::move(cell));
      cell.clear();
      any = true;
    } else if (c == '\n') {
      end_row();
    } else if (c != '\r') {
      cell += c;
      any = true;
    }
  }
  end_row();
  return rows;
}

// "1,234.5"; anything but a number is one that was not read.
double number_of(std::string text) {
  std::erase(text, ',');
  char* end = nullptr;
  const double x = std::strtod(text.c_str(), &end);
  return !text.empty() && end == text.c_str() + text.size() && std::isfinite(x) ? x : kNotRead;
}

// "void (anonymous namespace)::scan_kernel<bf16, 64>(Params)" is "scan_kernel<bf16, 64>".
std::string short_name(std::string name) {
  if (name.starts_with("void ")) name.erase(0, 5);
  int depth = 0;
  std::size_t end = name.size();
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>' && depth > 0) --depth;
    if (name[i] == '(' && depth == 0 && i > 0) {
      end = i;
      break;
    }
  }
  name.erase(end);
  const std::size_t open = name.find('<');
  if (const std::size_t at = name.rfind("::", open); at != std::string::npos && at + 2 < name.size())
    name.erase(0, at + 2);
  return name;
}

std::string spaced(std::string name) {
  std::replace(name.begin(), name.end(), '_', ' ');
  return name;
}

// The words of the first line that ncu marks as an error.
std::string error_in(const std::string& text) {
  constexpr std::string_view kMark = "==ERROR==";
  if (text.find("ERR_NVGPUCTRPERM") != std::string::npos)
    return "the driver lets this user read no counters (ERR_NVGPUCTRPERM): its option "
           "NVreg_RestrictProfilingToAdminUsers=0, or root";
  for (const std::string& line : split(text, '\n'))
    if (const std::size_t at = line.find(kMark); at != std::string::npos)
      return line.substr(std::min(line.size(), at + kMark.size() + 1));
  return "";
}

// PATH, then where toolkits are installed; empty: nowhere.
std::string find_ncu() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value != nullptr ? value : "");
  };
  std::vector<std::string> folders = split(variable("PATH"), ':');
  for (const char* home : {"CUDA_HOME", "CUDA_PATH"})
    if (const std::string h = variable(home); !h.empty()) folders.push_back(h + "/bin");
  folders.emplace_back("/usr/local/cuda/bin");
  for (const std::string& f : folders) {
    const fs::path at = fs::path(f.empty() ? "." : f) / "ncu";
    if (access(at.c_str(), X_OK) == 0 && fs::is_regular_file(at)) return at.string();
  }
  return "";
}

// The last line that says something.
std::string last_line(const std::string& text) {
  std::string last;
  for (const std::string& line : split(text, '\n'))
    if (line.find_first_not_of(" \t\r") != std::string::npos) last = line;
  return last.substr(0, 200);
}

}  // namespace

NcuReadings parse_ncu(const std::string& output) {
  NcuReadings r;
  const std::string mark = "\"ID\",";
  std::size_t begin = output.starts_with(mark) ? 0 : output.find("\n" + mark);
  if (begin == std::string::npos) {
    r.missing = error_in(output);
    if (r.missing.empty() && output.find("No kernels were profiled") != std::string::npos)
      r.missing = "ncu saw no kernel in the call's range";
    if (r.missing.empty()) r.missing = "ncu printed no table of kernels";
    return r;
  }
  const auto rows = csv_rows(std::string_view(output).substr(begin));
  std::map<std::string, std::size_t> column;
  for (std::size_t i = 0; i < rows.front().size(); ++i) column.emplace(rows.front()[i], i);
  for (std::size_t n = 2; n < rows.size(); ++n) {  // below the names are the units
    const auto& row = rows[n];
    if (row.size() != rows.front().size()) continue;
    const auto text = [&](const char* name) {
      const auto it = column.find(name);
      return it == column.end() ? std::string() : row[it->second];
    };
    const auto value = [&](const char* name) { return number_of(text(name)); };
    KernelReading k;
    k.name = short_name(text("Kernel Name"));
    k.grid = text("Grid Size");
    k.block = text("Block Size");
    k.us = value("gpu__time_duration.sum") * 1e-3;
    k.memory = value("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed") * 1e-2;
    k.compute = value("sm__throughput.avg.pct_of_peak_sustained_elapsed") * 1e-2;
    k.dram = value("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed") * 1e-2;
    k.occupancy = value("sm__warps_active.avg.pct_of_peak_sustained_active") * 1e-2;
    k.dram_bytes = value("dram__bytes_read.sum") + value("dram__bytes_write.sum");
    k.registers = value("launch__registers_per_thread");
    k.local_instructions = value("smsp__inst_executed_op_local_ld.sum") + value("smsp__inst_executed_op_local_st.sum");
    k.local_bytes =
        value("l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum") + value("l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum");
    double sum = 0.0, most = 0.0;
    for (const auto& [name, i] : column) {
      if (!name.starts_with(kStallPrefix) || !name.ends_with(kStallSuffix)) continue;
      const std::string reason =
          name.substr(kStallPrefix.size(), name.size() - kStallPrefix.size() - kStallSuffix.size());
      const double x = number_of(row[i]);
      if (reason == "selected" || reason == "not_selected" || std::isnan(x)) continue;  // those warps could go on
      sum += x;
      if (x <= most) continue;
      most = x;
      k.stall = spaced(reason);
    }
    k.stall_share = sum > 0 ? most / sum : kNotRead;
    if (!std::isnan(k.us)) r.kernels.push_back(std::move(k));
  }
  if (r.kernels.empty()) {
    r.missing = error_in(output);
    if (r.missing.empty()) r.missing = "ncu's table has no readings";
  }
  return r;
}

NcuReadings run_ncu(const std::vector<std::string>& command, const std::string& range, int timeout_s) {
  NcuReadings r;
  const std::string ncu = find_ncu();
  if (ncu.empty()) {
    r.missing = "ncu (Nsight Compute) is neither in PATH nor in the CUDA toolkit's folder";
    return r;
  }
  std::vector<std::string> argv = {ncu, "--clock-control", "none", "--nvtx", "--nvtx-include", "fla@" + range + "/"};
  for (const char* section : {"SpeedOfLight", "WarpStateStats", "Occupancy", "LaunchStats"})
    argv.insert(argv.end(), {"--section", section});
  argv.insert(argv.end(), {"--metrics", kMetrics, "--csv", "--page", "raw", "--print-units", "base"});
  argv.insert(argv.end(), command.begin(), command.end());
  try {
    const ChildResult child = run_child(argv, {.timeout_s = timeout_s});
    if (child.timed_out) {
      r.missing = fmt::format("ncu did not end within {} s", timeout_s);
      return r;
    }
    r = parse_ncu(child.out);
    if (!r.kernels.empty()) return r;
    if (const std::string why = error_in(child.err); !why.empty())
      r.missing = why;
    else if (!child.ok() && error_in(child.out).empty())
      r.missing = fmt::format("ncu ended with status {}: {}", child.code,
                              last_line(last_line(child.err).empty() ? child.out : child.err));
  } catch (const Stop& e) {
    r.missing = e.what();
  }
  return r;
}

std::string KernelReading::text() const {
  std::string s;
  const auto add = [&](double x, const std::string& what) {
    if (!std::isnan(x)) s += (s.empty() ? "" : ", ") + what;
  };
  add(memory, fmt::format("memory {:.0f} %", 100 * memory));
  add(compute, fmt::format("compute {:.0f} %", 100 * compute));
  add(dram, fmt::format("DRAM {:.0f} %", 100 * dram));
  add(occupancy, fmt::format("occupancy {:.0f} %", 100 * occupancy));
  if (!stall.empty()) add(stall_share, fmt::format("top stall {} ({:.0f} %)", stall, 100 * stall_share));
  add(registers, fmt::format("{:.0f} registers", registers));
  add(local_instructions, local_instructions > 0 ? fmt::format("spills: {:.4g} instructions", local_instructions)
                                                 : std::string("no spills"));
  if (local_instructions > 0) add(local_bytes, bytes_text(local_bytes));
  return s;
}

Json to_json(const KernelReading& k) {
  return {{"kernel", k.name},
          {"grid", k.grid},
          {"block", k.block},
          {"us", number(k.us)},
          {"memory", number(k.memory)},
          {"compute", number(k.compute)},
          {"dram", number(k.dram)},
          {"dram_bytes", number(k.dram_bytes)},
          {"occupancy", number(k.occupancy)},
          {"stall", k.stall.empty() ? Json(nullptr) : Json(k.stall)},
          {"stall_share", number(k.stall_share)},
          {"registers", number(k.registers)},
          {"local_instructions", number(k.local_instructions)},
          {"local_bytes", number(k.local_bytes)}};
}

}  // namespace fla::tools
