// What this library is and how it was built.
#pragma once

#include "fla/core/export.h"

namespace fla {

struct BuildInfo {
  const char* version;     // "0.1.0"
  const char* commit;      // "3f2a1b9c0d4e", "3f2a1b9c0d4e-dirty" or "unknown"
  const char* compiler;    // "GNU 12.2.0"
  const char* flags;       // those that change the code, as one string
  const char* build_type;  // "Release"
  const char* cuda;        // the GPUs that its CUDA code is for, as CMake names them; "" without CUDA code
};

// The semantic version of the library in use. fla/version.h has that of the headers as macros.
FLA_API const char* version();
FLA_API const BuildInfo& build_info();

}  // namespace fla
