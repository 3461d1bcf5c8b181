// Plug-ins: shared libraries with the entry point of fla/plugin.h become backends of a registry.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "fla/core/export.h"
#include "fla/core/status.h"
#include "fla/registry/registry.h"

namespace fla {

struct Plugin {
  std::string name;  // of its backend
  std::string path;
  int priority = 5;
  DeviceType device = DeviceType::Cpu;
  std::vector<std::string> functions;  // served ones; backwards by their own names
};

// What a tool puts around each of the plug-in's kernels.
using WrapKernel = std::function<ErasedKernel(ErasedKernel, const FunctionSpec&)>;

// Adds the kernels of the plug-in at `path` (a file, never searched for) to the registry, or, when anything about it is
// wrong, nothing. Its code stays loaded until the process ends and runs inside the process: `fla gate --plugin` judges
// a plug-in from outside. No call of the registry may be under way in another thread.
FLA_API Result<Plugin> load_plugin(Registry& registry, const std::string& path, const WrapKernel& wrap = {});
// The same for the library's own registry, which every context uses that names no other.
FLA_API Result<Plugin> load_plugin(const std::string& path, const WrapKernel& wrap = {});

}  // namespace fla
