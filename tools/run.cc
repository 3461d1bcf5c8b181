// fla run: an operator on tensors from a file.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>

#include "CLI/CLI.hpp"
#include "fla/core/text.h"
#include "fla/core/version.h"
#include "fla/registry/dynamic.h"
#include "tools/command.h"
#include "tools/common/buffer.h"
#include "tools/common/machine.h"
#include "tools/common/placement.h"
#include "tools/common/safetensors.h"
#include "tools/plugin/child.h"

namespace fla::tools {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string op, in, out;
  std::vector<std::string> set;
  bool backward = false, check_values = false, json = false;
  CallOptions call;
  PluginOptions plugin;
};

// Finds out before the work whether the result can be written. The writer puts a new file beside the old one first.
void require_writable(const std::string& out) {
  std::error_code error;
  const Result<fs::path> target = write_target(out);
  if (!target) refuse("--out: {}", target.status().message());
  const fs::path path = fs::absolute(*target, error);
  if (error || path.filename().empty()) refuse("--out: expected a file, got '{}'", printable(out));
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status) && !fs::is_regular_file(status))
    refuse("--out: expected a file, got a folder or device '{}'", printable(out));
  std::string probe = (path.parent_path() / ".fla_run.XXXXXX").string();
  const int fd = mkstemp(probe.data());
  if (fd < 0) refuse("--out: cannot write '{}': {}", printable(out), std::strerror(errno));
  close(fd);
  unlink(probe.c_str());
}

bool ignored(std::string_view name) {
  return name.starts_with("out.") || name.starts_with("grad.") || name.starts_with("aux.");
}

using Results = std::vector<std::pair<std::string, Buffer>>;

LastRoute compute(const Context& ctx, DynamicCall& call, Device device, Results& results) {
  for (const auto& out : check(call.outputs(ctx))) {
    results.emplace_back(out.name, Buffer(out.dtype, out.shape));
    if (out.contents) assign(results.back().second.view(), values(out.contents));
    check(call.bind(out.name, results.back().second.view()));
  }
  if (device.type == DeviceType::Cpu) {
    check(call.run(ctx));
    return last_route();
  }
  const Executed x = execute(ctx, call, device);
  check(x.status);
  if (!x.faults.empty()) throw Stop(kFailed, x.faults.front());
  return x.route;
}

int run(const Options& o) {
  const Registry& r = Registry::global();
  const std::string in = printable(o.in), out = printable(o.out);
  const FunctionSpec& spec = find_operator(r, o.op).spec;
  const Device device = device_of(o.call);
  require_backend(r, o.call.backend);
  if (o.backward && spec.backward.empty()) refuse("--backward: {} has none", spec.name);

  DynamicCall call = check(DynamicCall::make(r, o.op));
  for (const auto& s : o.set) {
    const std::size_t equals = s.find('=');
    if (equals == std::string::npos) refuse("--set: expected name=value, got '{}'", printable(s));
    check(call.set_flag_text(s.substr(0, equals), s.substr(equals + 1)));
  }

  const std::shared_ptr<SafeTensorsFile> file = check(SafeTensorsFile::open(o.in));
  std::vector<std::pair<std::string, TensorView>> upstream;
  for (const auto& [name, t] : file->tensors()) {
    if (ignored(name)) continue;
    if (name.starts_with("grad_out.")) {
      if (o.backward) upstream.emplace_back(name, t);
      continue;
    }
    if (Status s = call.set(name, t); !s) refuse("{}: {}", in, s.message());
  }
  for (const auto& [name, type] : file->unsupported())
    if (!ignored(name) && (o.backward || !name.starts_with("grad_out.")))
      refuse("{}: {}: expected dtype F32, F16, BF16, F64, I32 or I64, got {}", in, printable(name), type);
  if (o.backward && upstream.empty())
    refuse("{}: --backward needs the gradient of an output, such as grad_out.o, got none", o.in);
  DynamicCall backward;
  if (o.backward) {
    backward = check(call.backward(r));
    for (const auto& [name, t] : upstream)
      if (Status s = backward.set(name, t); !s) refuse("{}: {}", in, s.message());
  }

  ContextOptions options = context_options(o.call);
  options.check_values = o.check_values;
  const Context ctx(std::move(options));
  // Every refusal comes before the first computation.
  if (auto outputs = call.outputs(ctx); !outputs) refuse("{}: {}", in, outputs.status().message());
  if (o.backward)
    if (auto outputs = backward.outputs(ctx); !outputs) refuse("{}: {}", in, outputs.status().message());
  std::error_code error;
  if (fs::equivalent(o.in, o.out, error)) refuse("--out: expected another file than --in, got '{}' for both", out);
  require_writable(o.out);

  Results results;
  const auto t0 = std::chrono::steady_clock::now();
  const LastRoute forward_route = compute(ctx, call, device, results);
  LastRoute backward_route;
  if (o.backward) backward_route = compute(ctx, backward, device, results);
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - t0).count();

  std::vector<std::pair<std::string, TensorView>> tensors;
  for (const auto& [name, b] : results) tensors.emplace_back(name, b.view());
  check(write_safetensors(o.out, tensors,
                          {{"op", spec.name}, {"backend", forward_route.backend}, {"fla", build_info().version}}));

  if (o.json) {
    Json outputs = Json::array();
    for (const auto& [name, t] : tensors)
      outputs.push_back({{"name", name},
                         {"dtype", name_of(t.dtype)},
                         {"shape", std::vector<std::int64_t>(t.dims().begin(), t.dims().end())}});
    print_json({{"op", spec.name},
                {"in", o.in},
                {"out", o.out},
                {"backend", forward_route.backend},
                {"kernel", forward_route.kernel},
                {"backward_backend", o.backward ? Json(backward_route.backend) : Json(nullptr)},
                {"threads", ctx.threads()},
                {"ms", ms},
                {"warnings", call.warnings()},
                {"outputs", std::move(outputs)}});
  } else {
    for (const auto& [name, t] : tensors) print("{} {} {}\n", name, name_of(t.dtype), shape_string(t.dims()));
    print("{}: {} ({}), {:.3f} ms, {}, written to {}\n", spec.name, forward_route.backend, forward_route.kernel, ms,
          threads_text(ctx.threads()), out);
  }
  return kGood;
}

}  // namespace

Command add_run(CLI::App& root) {
  auto o = std::make_shared<Options>();
  CLI::App* app =
      add_command(root, "run", "Run an operator on tensors from a .safetensors file",
                  "  fla run chunk_gla --in tests/golden/gla/strong_gate_state.safetensors --out o.safetensors\n"
                  "  fla run chunk_gla --in layer.safetensors --out o.safetensors --set output_final_state=true\n"
                  "  fla run chunk_gla --in layer.safetensors --out g.safetensors --backward   (reads grad_out.o)");
  app->add_option("OP", o->op, "operator")->required();
  app->add_option("--in", o->in, "tensors by argument name; out.*, grad.* and aux.* are ignored")->required();
  app->add_option("--out", o->out, "file to write: out.o, out.final_state, grad.q, ...")->required();
  app->add_option("--set", o->set, "a flag: name=value; repeatable (flags in the file's metadata do not count)")
      ->allow_extra_args(false);
  app->add_flag("--backward", o->backward, "gradients too, from the file's grad_out.* tensors");
  app->add_flag("--check-values", o->check_values,
                "first look for NaN, infinities and log gates above 0 in the inputs, on a GPU also for boundaries and "
                "slots out of "
                "range");
  add_device(app, o->call);
  add_backend(app, o->call);
  add_threads(app, o->call);
  add_plugin(app, o->plugin);
  add_json(app, o->json);
  return {app, [o] {
            return with_plugin(o->plugin, o->json, {{"op", o->op}}, [&](const std::string&) { return run(*o); });
          }};
}

}  // namespace fla::tools
