// fla doctor: the facts that a report needs.
#include <cstdlib>
#include <memory>
#include <thread>

#include "CLI/CLI.hpp"
#include "fla/core/threads.h"
#include "fla/core/version.h"
#include "fla/registry/registry.h"
#include "tools/command.h"
#include "tools/common/frozen.h"
#include "tools/common/machine.h"
#include "tools/gate_runner.h"
#include "tools/gpu/device.h"

namespace fla::tools {
namespace {

int run(bool json) {
  const Machine m = machine();
  const BuildInfo& b = build_info();
  const Registry& r = Registry::global();
  Json set = Json::object();
  for (const auto& v : environment_variables(r))
    if (const char* value = std::getenv(v.name.c_str())) set[v.name] = value;
  std::size_t functions = 0;
  for (const Registry::Entry* e : r.entries()) functions += e->spec.is_backward() ? 0U : 1U;
  const std::string gate = find_gate();
  const int threads = ThreadPool().size();
  Json gpus = Json::array();
  std::string gpu;
  for (int i = 0;; ++i) {
    const Result<gpu::DeviceText> text = gpu::device_text(i);
    if (!text) {
      if (i == 0) gpu = "none: " + text.status().message();
      break;
    }
    const DeviceInfo d = check(gpu::device_info(i));
    gpus.push_back({{"name", text->name},
                    {"compute_capability", fmt::format("{}.{}", d.sm / 10, d.sm % 10)},
                    {"multiprocessors", d.sm_count},
                    {"memory_bytes", text->memory_bytes},
                    {"driver", text->driver},
                    {"runtime", text->runtime}});
    gpu += fmt::format("{}{} (compute capability {}.{}, {} multiprocessors, {}), driver {}, runtime {}",
                       i == 0 ? "" : "; ", text->name, d.sm / 10, d.sm % 10, d.sm_count,
                       bytes_text(static_cast<double>(text->memory_bytes)), text->driver, text->runtime);
    if (i + 1 >= text->devices) break;
  }
  if (json) {
    print_json({{"version", b.version},
                {"commit", b.commit},
                {"build_type", b.build_type},
                {"compiler", b.compiler},
                {"flags", b.flags},
                {"cpu", m.cpu},
                {"isa", m.isa},
                {"processors", m.processors},
                {"threads", threads},
                {"memory_bytes", m.memory_bytes},
                {"available_bytes", m.available_bytes},
                {"system", m.system},
                {"gpu", gpus.empty() ? Json(nullptr) : gpus},
                {"cuda", b.cuda},
                {"gpu_problem", gpus.empty() ? Json(gpu) : Json(nullptr)},
                {"functions", functions},
                {"gate", gate.empty() ? Json(nullptr) : Json(gate)},
                {"frozen_hash", frozen_hash()},
                {"defects", r.defects()},
                {"environment", set}});
  } else {
    std::string variables;
    for (const auto& [name, value] : set.items())
      variables += (variables.empty() ? "" : ", ") + name + "=" + value.get<std::string>();
    print_table({{"version", b.version},
                 {"commit", b.commit},
                 {"build", std::string(b.build_type) + ", " + b.compiler + ", " + b.flags},
                 {"cpu", m.cpu},
                 {"isa", m.isa + " (chosen at run time)"},
                 {"threads", fmt::format("{} of {} processors", threads, m.processors)},
                 {"memory", fmt::format("{}, {} available", bytes_text(static_cast<double>(m.memory_bytes)),
                                        bytes_text(static_cast<double>(m.available_bytes)))},
                 {"system", m.system},
                 {"gpu", gpu},
                 {"cuda code", *b.cuda == '\0' ? "none" : std::string("for ") + b.cuda},
                 {"operators", fmt::format("{} functions in {} families", functions, r.operations().size())},
                 {"gate", gate.empty() ? "not found beside the program" : gate},
                 {"frozen files", fmt::format("{}, {} files", frozen_hash(), frozen_files().size())},
                 {"environment", variables.empty() ? "no variable of the library is set" : variables}});
    for (const auto& d : r.defects()) print("defect: {}\n", d);
  }
  return r.defects().empty() ? kGood : kFailed;
}

}  // namespace

Command add_doctor(CLI::App& root) {
  auto json = std::make_shared<bool>(false);
  CLI::App* app = add_command(root, "doctor", "What this build and this machine are: for bug reports",
                              "  fla doctor\n  fla doctor --json");
  add_json(app, *json);
  return {app, [json] { return run(*json); }};
}

}  // namespace fla::tools
