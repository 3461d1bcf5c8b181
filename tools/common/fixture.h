// Recorded cases: reads one file, recomputes it with every function it names and compares, by the rules of the
// contract's README.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "fla/core/context.h"
#include "fla/core/dtype.h"
#include "fla/core/status.h"
#include "fla/core/tensor.h"

namespace fla::tools {

struct TensorResult {
  std::string name;  // as in the file: "out.o", "grad.g"
  double R = 0.0;    // NaN (in JSON null) when a NaN or Inf came out
  double max_abs = 0.0;
  std::vector<std::int64_t> index;  // where max_abs is
  double limit = 0.0;               // on R; on max_abs where the expected tensor is identically zero
  double block_R = 0.0;
  bool ok = false;
  std::string reason;  // empty when ok
};

struct CheckResult {
  enum class Status : std::uint8_t { Ok, Failed, NotCovered };
  std::string file;
  std::string function;
  std::string backend;  // that served it; "" when none did
  DType dtype = DType::F32;
  Status status = Status::NotCovered;
  std::string reason;  // why not ok
  std::vector<std::string> dropped_flags;
  std::vector<std::string> uncovered;  // gradients in the file, where the one backend allowed has no backward
  std::vector<TensorResult> tensors;

  bool ok() const { return status == Status::Ok; }
};
const char* name_of(CheckResult::Status s);  // "ok", "failed", "not_covered"

struct CheckOptions {
  std::string backend;       // only this one may serve; empty: ctx decides
  std::string function;      // only this one of the file's functions; empty: all
  DType dtype = DType::F32;  // F32, BF16 or F16
  Device device;
};

// One result per function the file names (none when `function` names another). A file that cannot be read, or that has
// a tensor or flag which no rule explains, is an error: its status names the file and what is wrong with it.
Result<std::vector<CheckResult>> check_file(const std::filesystem::path& file, const CheckOptions& options,
                                            const Context& ctx);

// The functions that a file names, in its order.
Result<std::vector<std::string>> recorded_functions(const std::filesystem::path& file);

// The *.safetensors files of a folder and its subfolders, or the file itself, in path order.
std::vector<std::filesystem::path> find_cases(const std::filesystem::path& file_or_folder);

}  // namespace fla::tools
