#include "tools/bench_runner.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>

#include "CLI/CLI.hpp"
#include "fla/core/version.h"
#include "fla/registry/dynamic.h"
#include "tools/call_sizes.h"
#include "tools/common/compare.h"
#include "tools/common/no_memory.h"
#include "tools/common/placement.h"
#include "tools/compare/paired_stats.h"
#include "tools/gpu/device.h"
#include "tools/plugin/guard.h"
#include "tools/shape_groups.h"

namespace fla::tools {
namespace {

using Clock = std::chrono::steady_clock;
using Entry = Registry::Entry;

constexpr double kWindowMs = 300.0;  // of one row, at least
constexpr std::size_t kLeastReps = 5;
constexpr double kTurnMs = 20.0;  // short rows take several repetitions when it is their turn
constexpr double kShortMs = 5.0;

double since_ms(Clock::time_point t0) { return std::chrono::duration<double, std::milli>(Clock::now() - t0).count(); }

template <typename U, U kExponent>
bool finite_bits(const TensorView& t) {
  const U* x = t.as<U>();
  const std::int64_t n = t.numel();
  bool ok = true;
  for (std::int64_t i = 0; i < n; ++i) ok &= (x[i] & kExponent) != kExponent;
  return ok;
}

}  // namespace

bool all_finite(const TensorView& t) {
  switch (t.dtype) {
    case DType::F32: return finite_bits<std::uint32_t, 0x7f800000U>(t);
    case DType::F16: return finite_bits<std::uint16_t, 0x7c00U>(t);
    case DType::BF16: return finite_bits<std::uint16_t, 0x7f80U>(t);
    case DType::F64: return finite_bits<std::uint64_t, 0x7ff0000000000000U>(t);
    default: return true;
  }
}

std::size_t bytes_of(const TensorView& t) { return static_cast<std::size_t>(t.numel()) * size_of(t.dtype); }

namespace {

bool with_states(const FunctionSpec& spec, const Sizes& s) {
  return s.T == 1 && spec.find_arg("initial_state") != nullptr;
}

}  // namespace

Case bench_case(const FunctionSpec& spec, const Sizes& sizes, DType dtype, std::uint64_t seed) {
  Case c = check(Case::make(Registry::global(), spec.name, sizes, {.dtype = dtype, .seed = seed}));
  const bool states = with_states(spec, sizes);
  if (states) c = c.with("initial_state");
  for (const auto& f : spec.flags)
    if (!f.set) c = c.flag(f.name, states && f.name == "output_final_state");
  return c;
}

double flops_of(const DynamicCall& call, const Sizes& sizes) {
  const FunctionSpec& spec = call.spec();
  if (!spec.flops) return 0.0;
  Dims d;
  for (const char* symbol : {"B", "T", "TQ", "H", "HV", "HQ", "K", "V", "M", "L", "D", "N"})
    if (*symbol == 'N' || uses(spec, symbol)) d.set(symbol, size_of_symbol(sizes, symbol));
  for (const auto& [symbol, derive] : spec.derived) d.set(symbol, derive(call.args(), d));
  return spec.flops(d);
}

namespace {

// One call with its outputs in place.
struct Bound {
  DynamicCall call;
  std::vector<Buffer> outputs;
  std::vector<std::string> names;
  std::size_t workspace = 0, output_bytes = 0, input_bytes = 0;
  double flops = 0.0;
  Route route;

  void bind(const Context& ctx, DynamicCall c, const Sizes& sizes) {
    call = std::move(c);
    for (const auto& x : check(call.outputs(ctx))) {
      outputs.emplace_back(x.dtype, x.shape);
      if (x.contents) assign(outputs.back().view(), values(x.contents));
      names.push_back(x.name);
      output_bytes += bytes_of(outputs.back().view());
      check(call.bind(x.name, outputs.back().view()));
    }
    const FunctionSpec& spec = call.spec();
    for (const auto& a : spec.args)
      if (a.role == Role::Input || a.role == Role::Upstream)
        for (const TensorView& t : a.get.views(call.args())) input_bytes += t.present() ? bytes_of(t) : 0;
    flops = flops_of(call, sizes);
  }
  // On the device that the call will run on.
  void ask(const Context& ctx) {
    workspace = check(call.workspace_bytes(ctx));
    route = check(call.explain(ctx));
  }
};

// An operator at one shape: memory that its modes share.
struct Prepared {
  const FunctionSpec& spec;
  Case c;
  Bound forward, backward;
  Buffer workspace;
  std::unique_ptr<Placement> placement;  // on a GPU
  bool has_backward = false;

  Prepared(const Context& ctx, const FunctionSpec& s, const Sizes& sizes, DType dtype, bool want_backward,
           Device device)
      : spec(s), c(bench_case(s, sizes, dtype)) {
    if (want_backward) c = c.prepared();
    forward.bind(ctx, check(c.call()), sizes);
    has_backward = want_backward;
    if (want_backward) backward.bind(ctx, check(c.backward_call()), sizes);
    if (device.type != DeviceType::Cpu) {
      std::vector<DynamicCall*> calls = {&forward.call};
      if (want_backward) calls.push_back(&backward.call);
      placement = std::make_unique<Placement>(std::move(calls), device);
      check(placement->place(ctx));
    }
    forward.ask(ctx);
    if (want_backward) backward.ask(ctx);
    if (!placement) workspace = Buffer::bytes(std::max(forward.workspace, backward.workspace));
  }
  Status run(const Context& ctx, bool with_backward) {
    const std::span<std::byte> memory = placement ? placement->workspace() : workspace.span();
    Status s = forward.call.run(ctx, memory);
    if (s && with_backward) s = backward.call.run(ctx, memory);
    return s;
  }
};

// The same call in small, against the reference in double precision.
struct Agreement {
  double err = 0.0;
  std::string problem;
};

}  // namespace

Sizes cut_down(Sizes s) {
  s.H = std::min<std::int64_t>(s.H, 2);
  s.D = std::min<std::int64_t>(s.D, 300);
  s.B = 1;
  if (s.cu_seqlens.empty()) {
    s.T = std::min<std::int64_t>(s.T, 200);
    return s;
  }
  std::vector<std::int64_t> cu{0};
  for (std::size_t i = 1; i < std::min<std::size_t>(s.cu_seqlens.size(), 5); ++i)
    cu.push_back(cu.back() + std::min<std::int64_t>(s.cu_seqlens[i] - s.cu_seqlens[i - 1], 100));
  s.cu_seqlens = cu;
  s.T = cu.back();
  return s;
}

double limit_of(const FunctionSpec& spec, const std::string& tensor, DType dtype) {
  if (dtype == DType::F32) return 1e-4;
  const bool gradient = tensor.starts_with("grad.");
  const std::string name = gradient ? "d" + tensor.substr(5) : tensor.substr(4);
  const double page = spec.tolerance_of(name);
  return dtype == DType::BF16 ? std::max(page, gradient ? 0.01 : 0.005) : page;
}

namespace {

void compare_outcomes(const FunctionSpec& spec, const Outcome& expected, const Outcome& got, DType dtype,
                      Agreement& a) {
  const auto problem = [&](const std::string& text) {
    if (a.problem.empty()) a.problem = "small case against the reference: " + text;
  };
  if (!got.ok()) return problem(got.problem());
  if (!expected.ok()) return problem("reference: " + expected.problem());
  for (const auto& [name, t] : got.tensors) {
    const double limit = limit_of(spec, name, dtype);
    const Difference d = compare(expected[name], t.view(), {.R = limit, .zero = dtype == DType::F32 ? 1e-5 : limit});
    if (!d.zero_reference) a.err = std::isnan(d.R) || d.R > a.err ? d.R : a.err;
    if (!d.ok) problem(fmt::format("{}: R {:.3g}, limit {:.3g} ({})", name, d.R, d.limit, d.reason));
  }
}

Agreement agree(const Context& ctx, const Context& reference, const FunctionSpec& spec, const Sizes& sizes, DType dtype,
                bool backward, Device device) {
  Agreement a;
  const Case c = bench_case(spec, cut_down(sizes), dtype).prepared();
  const Case wide = c.widen(DType::F64);
  compare_outcomes(spec, wide.run(reference), c.run(ctx, {.device = device}), dtype, a);
  if (backward) {
    const FunctionSpec& b = Registry::global().find(spec.backward)->spec;
    compare_outcomes(b, wide.run_backward(reference), c.run_backward(ctx, {.device = device}), dtype, a);
  }
  return a;
}

}  // namespace

double estimate_bytes(const FunctionSpec& spec, const Sizes& s, DType dtype, bool backward) {
  double sum = 0.0, largest = 0.0;
  const std::shared_ptr<void> args = spec.make_args();
  for (const auto& [name, v] : spec.bench_flags)
    if (const FlagSpec* f = spec.find_flag(name); f != nullptr && f->set) f->set(args.get(), v);
  for (const auto& a : spec.args) {
    if (!a.required && !a.gen.by_default() && a.role == Role::Input) continue;
    if (!a.requested_by.empty()) continue;
    double n = a.list() ? static_cast<double>(axis_size(s, spec, args.get(), a.count)) : 1.0;
    for (const auto& d : a.dims) n *= static_cast<double>(axis_size(s, spec, args.get(), d));
    const double bytes = n * static_cast<double>(a.types == Types::Wide ? size_of(dtype) : 4);
    sum += backward ? 2 * bytes : bytes;
    largest = std::max(largest, n * 8.0);
  }
  return sum + largest;
}

namespace {

struct Job {
  const Entry* entry;
  const NamedShape* shape;
  Sizes sizes;
  bool backward;
  std::vector<std::size_t> rows;  // of the run
  double estimate;
};

struct Timed {
  BenchRow* row;
  Prepared* prepared;
  bool with_backward;
  std::vector<double> ms;
  std::vector<double> host_us{};
  double total = 0.0, last = 0.0;
  bool done() const { return !row->error.empty() || (ms.size() >= kLeastReps && total >= kWindowMs); }
};

// One repetition, timed. An error ends the row.
void repeat(const Context& ctx, Timed& t, bool count) {
  const auto t0 = Clock::now();
  Status s = t.prepared->run(ctx, t.with_backward);
  t.last = since_ms(t0);
  if (!s) {
    t.row->error = s.message();
  } else if (count) {
    t.ms.push_back(t.last);
    t.total += t.last;
  }
}

// A GPU's: several calls are queued without waiting, each behind a write that takes longer than the call's launches and
// replaces what the second-level cache holds, and timed by the device.
class GpuBatch {
 public:
  explicit GpuBatch(int device) {
    const DeviceInfo info = check(gpu::device_info(device));
    flush_ = check(gpu::allocate(4 * info.l2_bytes, device));
    for (auto& t : timers_) t = gpu::make_timer({});
  }
  void repeat(const Context& ctx, Timed& t, bool count) {
    const gpu::Range range(range_name(t.row->op, t.row->mode, t.row->shape));
    Status s;
    std::array<double, kCalls> host{};
    for (std::size_t i = 0; i < kCalls && s; ++i) {
      s = flush_->fill(0, flush_->size(), std::byte{0}, {});
      timers_[i]->start();
      const auto t0 = Clock::now();
      if (s) s = t.prepared->run(ctx, t.with_backward);
      host[i] = since_ms(t0) * 1e3;
      timers_[i]->stop();
    }
    for (std::size_t i = 0; i < kCalls && s; ++i) {
      const Result<double> ms = timers_[i]->milliseconds();
      s = ms.status();
      if (!s) break;
      t.last = *ms;
      if (!count) continue;
      t.ms.push_back(*ms);
      t.host_us.push_back(host[i]);
      t.total += *ms;
    }
    if (!s) t.row->error = s.message();
  }

 private:
  static constexpr std::size_t kCalls = 8;
  std::unique_ptr<gpu::Memory> flush_;
  std::array<std::unique_ptr<gpu::Timer>, kCalls> timers_;
};

// Once more after a first call, which may still load kernels.
void call_once(const Context& ctx, std::deque<Timed>& rows, Device device) {
  for (Timed& t : rows) {
    Status s = t.row->error.empty() ? t.prepared->run(ctx, t.with_backward) : Status();
    if (s) s = gpu::synchronize(device.index);
    if (s && t.row->error.empty()) {
      const gpu::Range range(range_name(t.row->op, t.row->mode, t.row->shape));
      s = t.prepared->run(ctx, t.with_backward);
      if (s) s = gpu::synchronize(device.index);
    }
    if (!s) t.row->error = s.message();
  }
}

void measure_gpu(const Context& ctx, std::deque<Timed>& rows, Device device, GpuWatch& watch, Progress& progress,
                 const std::string& where) {
  const GpuWatch::During during(watch);
  GpuBatch batch(device.index);
  for (Timed& t : rows) batch.repeat(ctx, t, false);
  for (int round = 1;; ++round) {
    std::size_t done = 0;
    for (Timed& t : rows) {
      if (t.done())
        ++done;
      else
        batch.repeat(ctx, t, true);
    }
    progress.show(fmt::format("bench: {} round {}, {} of {} rows done", where, round, done, rows.size()));
    if (done == rows.size()) return;
  }
}

void measure(const Context& ctx, std::deque<Timed>& rows, Progress& progress, const std::string& where) {
  const PluginAtSpeed at_speed;
  for (Timed& t : rows) {
    t.ms.reserve(1 << 16);
    progress.show(fmt::format("bench: {} warming up {} {} {}", where, t.row->op, t.row->shape, t.row->mode));
    const auto t0 = Clock::now();
    do repeat(ctx, t, false);
    while (t.row->error.empty() && since_ms(t0) < 25.0);
  }
  for (int round = 1;; ++round) {
    std::size_t done = 0;
    for (Timed& t : rows) {
      if (t.done()) {
        ++done;
        continue;
      }
      // Whoever ran before has left its own data in the caches.
      if (t.last < kShortMs) repeat(ctx, t, false);
      const auto t0 = Clock::now();
      do repeat(ctx, t, true);
      while (!t.done() && since_ms(t0) < kTurnMs);
    }
    progress.show(fmt::format("bench: {} round {}, {} of {} rows done", where, round, done, rows.size()));
    if (done == rows.size()) return;
  }
}

double floor_of(const BenchRun& run, double flops, double bytes) {
  if (run.device == "cpu") return flops > 0 ? floor_ms(run.roof, flops, bytes) : 0.0;
  return run.gpu.peak_gbytes > 0 ? bytes / run.gpu.peak_gbytes * 1e-6 : 0.0;
}

void finish(Timed& t, const BenchRun& run) {
  BenchRow& r = *t.row;
  const Prepared& p = *t.prepared;
  const Route& route = t.with_backward ? p.backward.route : p.forward.route;
  r.backend = route.chosen;
  r.kernel = p.forward.route.kernel;
  if (t.with_backward && p.forward.route.chosen != route.chosen)
    r.backend = p.forward.route.chosen + "+" + route.chosen;
  if (t.with_backward && route.kernel != r.kernel) r.kernel += "+" + route.kernel;
  r.workspace_bytes = t.with_backward ? std::max(p.forward.workspace, p.backward.workspace) : p.forward.workspace;
  r.peak_bytes = r.workspace_bytes + p.forward.output_bytes +
                 (t.with_backward ? p.backward.input_bytes + p.backward.output_bytes : p.forward.input_bytes);
  r.bytes = static_cast<double>(p.forward.input_bytes + p.forward.output_bytes);
  r.flops = p.forward.flops;
  if (t.with_backward) {
    r.bytes += static_cast<double>(p.backward.input_bytes + p.backward.output_bytes);
    r.flops = p.forward.flops > 0 && p.backward.flops > 0 ? p.forward.flops + p.backward.flops : 0.0;
  }
  r.floor = floor_of(run, r.flops, r.bytes);
  std::sort(t.host_us.begin(), t.host_us.end());
  if (!t.host_us.empty()) r.host_us = percentile(t.host_us, 0.5);
  if (t.ms.empty()) return;
  std::sort(t.ms.begin(), t.ms.end());
  r.n = t.ms.size();
  r.median = percentile(t.ms, 0.5);
  r.p10 = percentile(t.ms, 0.1);
  r.p20 = percentile(t.ms, 0.2);
  r.p80 = percentile(t.ms, 0.8);
  r.p90 = percentile(t.ms, 0.9);
  if (!r.error.empty()) return;
  const auto wrong = [](const Bound& b) -> std::string {
    for (std::size_t i = 0; i < b.outputs.size(); ++i)
      if (!all_finite(b.outputs[i].view()))
        return b.names[i] + " has NaN or infinity after timing, or was not written";
      else if (!b.outputs[i].guards_intact())
        return b.names[i] + ": memory beside it was written to during timing";
    return "";
  };
  r.error = wrong(p.forward);
  if (r.error.empty() && t.with_backward) r.error = wrong(p.backward);
  if (r.error.empty() && !p.placement && !p.workspace.guards_intact())
    r.error = "memory beside the workspace was written to";
}

// Whether the one backend that is allowed has a kernel for the function at all.
bool served_by(const std::string& backend, const std::string& function) {
  if (backend.empty()) return true;
  const std::vector<std::string> have = backends_of(Registry::global().find(function));
  return std::find(have.begin(), have.end(), backend) != have.end();
}

}  // namespace

std::string range_name(const std::string& op, const std::string& mode, const std::string& shape) {
  std::string name = op + " " + mode + " " + shape;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '-' && c != ' ') c = '_';
  return name;
}

std::vector<std::string> parse_modes(const std::string& text) {
  std::vector<std::string> modes;
  for (const auto& m : split(text, ',')) {
    if (m != "fwd" && m != "fwdbwd")
      refuse("--modes: expected fwd, fwdbwd or both separated by a comma, got '{}'", text);
    if (std::find(modes.begin(), modes.end(), m) == modes.end()) modes.push_back(m);
  }
  return modes;
}

bool skips(const FunctionSpec& spec, const NamedShape& s, std::size_t operators) {
  const auto T = s.dims.find("T");
  const auto most = spec.max_dim.find("T");
  const bool long_one = T != s.dims.end() && most != spec.max_dim.end() && T->second > most->second;
  return operators > 1 && (long_one || (!s.cu_seqlens.empty() && spec.find_arg("cu_seqlens") == nullptr));
}

void add_bench_options(CLI::App* app, BenchOptions& o) {
  std::string groups;
  for (const auto& g : shape_groups()) groups += (groups.empty() ? "" : "; ") + g.name + ": " + g.doc;
  app->add_option("--shapes", o.shapes,
                  "names such as B1_T512_H16_D64, or groups, separated by commas (" + groups + ")")
      ->check(not_empty("names or groups"));
  app->add_option("--custom-shapes", o.custom_shapes, R"(JSON or @FILE: {"name": {"B": 1, "T": 64, "H": 2, "D": 64}})")
      ->check(not_empty("JSON or @FILE"));
  app->add_option("--modes", o.modes, "fwd, fwdbwd, or both separated by a comma (default both)")
      ->check(not_empty("fwd, fwdbwd or both separated by a comma"));
  app->add_option("--varlen", o.varlen,
                  "packed sequences, H16, D64 and D128: even, ragged, or boundaries such as 0,20,64")
      ->check(not_empty("even, ragged or boundaries"));
  add_dtype(app, o.call);
  add_device(app, o.call);
  add_backend(app, o.call);
  add_threads(app, o.call);
}

int BenchRun::exit_code() const {
  if (rows.empty()) return kNothing;
  return std::all_of(rows.begin(), rows.end(), [](const BenchRow& r) { return r.ok(); }) ? kGood : kFailed;
}

void validate(const std::vector<const Entry*>& ops, const BenchOptions& o) {
  if (device_of(o.call).type == DeviceType::Cpu && o.once) refuse("--once: expected with --device cuda, got cpu");
  require_backend(Registry::global(), o.call.backend);
  if (!o.modes.empty()) parse_modes(o.modes);
  for (const NamedShape& s : bench_shapes(o.shapes, o.custom_shapes, o.varlen))
    for (const Entry* e : ops)
      if (!skips(e->spec, s, ops.size())) sizes_for(e->spec, s);
}

BenchRun run_bench(const std::vector<const Entry*>& ops, const BenchOptions& o) {
  validate(ops, o);
  const std::vector<NamedShape> shapes = bench_shapes(o.shapes, o.custom_shapes, o.varlen);
  const std::vector<std::string> modes = parse_modes(o.modes.empty() ? "fwd,fwdbwd" : o.modes);
  const DType dtype = parse_dtype(o.call.dtype);

  BenchRun run;
  run.dtype = o.call.dtype;
  run.device = o.call.device;
  const Device device = device_of(o.call);
  if (device.type != DeviceType::Cpu) run.gpu = check(gpu::device_text(device.index));
  std::vector<Job> jobs;
  for (const Entry* e : ops)
    for (const NamedShape& s : shapes) {
      const FunctionSpec& spec = e->spec;
      if (skips(spec, s, ops.size())) {
        print(stderr, "{}: takes {}: no row for {}\n", spec.name,
              s.cu_seqlens.empty() ? "fewer tokens" : "no packed sequences", s.name);
        continue;
      }
      Job job{e, &s, sizes_for(spec, s), false, {}, 0.0};
      for (const auto& mode : modes) {
        const bool backward = mode == "fwdbwd";
        if (backward && o.modes.empty() && (spec.backward.empty() || !served_by(o.call.backend, spec.backward)))
          continue;
        BenchRow row;
        row.op = spec.name;
        row.mode = mode;
        row.shape = s.name;
        row.sizes = s;
        if (backward && spec.backward.empty())
          row.error = "has no backward";
        else
          job.backward |= backward, job.rows.push_back(run.rows.size());
        run.rows.push_back(std::move(row));
      }
      job.estimate = estimate_bytes(spec, job.sizes, dtype, job.backward);
      jobs.push_back(std::move(job));
    }

  const Context ctx(context_options(o.call));
  CallOptions by_reference = o.call;
  by_reference.backend = kReference;
  ContextOptions silent = context_options(by_reference);
  silent.log = {};  // what it has to say, the other context says
  const Context reference(silent);
  run.threads = ctx.threads();
  run.machine = run.after = machine();
  if (run.rows.empty()) return run;
  Progress progress;
  if (device.type == DeviceType::Cpu) {
    progress.show("bench: measuring the machine");
    run.roof = measure_roof(ctx.pool());
  }
  std::optional<GpuWatch> watch;
  if (o.once) run.clocks.missing = "nothing is timed";
  if (device.type != DeviceType::Cpu && !o.once) {
    check(gpu::synchronize(device.index));  // so that this process counts as one that computes there
    watch.emplace(run.gpu.pci);
  }

  const double most = 0.8 * static_cast<double>(run.machine.available_bytes);
  const double together = std::min(most / 2, 4.0 * 1024 * 1024 * 1024);
  for (std::size_t begin = 0; begin < jobs.size();) {
    // As many shapes as fit side by side are measured in turns.
    std::size_t end = begin;
    for (double sum = 0.0; end < jobs.size() && (end == begin || sum + jobs[end].estimate <= together); ++end)
      sum += jobs[end].estimate;
    const std::string where =
        end - begin == jobs.size() ? "" : fmt::format("[{}-{} of {}]", begin + 1, end, jobs.size());
    std::vector<std::unique_ptr<Prepared>> prepared;
    std::deque<Timed> timed;
    for (std::size_t j = begin; j < end; ++j) {
      const Job& job = jobs[j];
      const FunctionSpec& spec = job.entry->spec;
      const auto fail = [&](const std::string& text) {
        for (const std::size_t i : job.rows) run.rows[i].error = text;
      };
      if (job.rows.empty()) continue;
      if (job.estimate > most) {
        fail(fmt::format("needs about {}, {} available", bytes_text(job.estimate),
                         bytes_text(static_cast<double>(run.machine.available_bytes))));
        continue;
      }
      progress.show(fmt::format("bench: {} preparing {} {}", where, spec.name, job.shape->name));
      try {
        const Agreement a = agree(ctx, reference, spec, job.sizes, dtype, job.backward, device);
        prepared.push_back(std::make_unique<Prepared>(ctx, spec, job.sizes, dtype, job.backward, device));
        for (const std::size_t i : job.rows) {
          BenchRow& row = run.rows[i];
          row.err = a.err;
          row.error = a.problem;
          timed.push_back({&row, prepared.back().get(), row.mode == "fwdbwd", {}});
        }
      } catch (const Stop& e) {  // this shape's failure, not the run's
        fail(e.what());
      } catch (const std::bad_alloc& e) {
        fail(memory_text(e));
      }
    }
    if (device.type == DeviceType::Cpu) {
      measure(ctx, timed, progress, where);
      run.roof.include(measure_roof(ctx.pool()));  // beside the rows: the machine may have been busy before them
    } else {
      if (o.once)
        call_once(ctx, timed, device);
      else
        measure_gpu(ctx, timed, device, *watch, progress, where);
      for (const auto& p : prepared) {
        std::vector<std::string> faults;
        const Status s = p->placement->fetch(faults);
        for (Timed& t : timed)
          if (t.prepared == p.get() && t.row->error.empty())
            t.row->error = !s ? s.message() : faults.empty() ? "" : faults.front();
      }
    }
    for (Timed& t : timed) {
      finish(t, run);
      t.row->checked = t.row->error.empty();
      if (run.device == "cpu" && t.row->n > 0 && t.row->error.empty() && t.row->flops > 0)
        t.row->error = beyond_roof(run.roof, t.row->median, t.row->flops, t.row->bytes);
    }
    begin = end;
  }
  if (watch) run.clocks = watch->finish();
  run.after = machine();
  return run;
}

Json machine_json(const BenchRun& b) {
  const BuildInfo& info = build_info();
  Json levels = Json::array();
  for (const auto& l : b.roof.levels) levels.push_back({{"bytes", l.bytes}, {"gbs", l.gbytes}});
  return {{"cpu", b.machine.cpu},
          {"isa", b.machine.isa},
          {"system", b.machine.system},
          {"processors", b.machine.processors},
          {"threads", b.threads},
          {"memory_bytes", b.machine.memory_bytes},
          {"mhz_before", b.machine.mhz > 0 ? Json(b.machine.mhz) : Json(nullptr)},
          {"mhz_after", b.after.mhz > 0 ? Json(b.after.mhz) : Json(nullptr)},
          {"gpu", b.device == "cpu" ? Json(nullptr)
                                    : Json{{"name", b.gpu.name},
                                           {"compute_capability", fmt::format("{}.{}", b.gpu.sm / 10, b.gpu.sm % 10)},
                                           {"driver", b.gpu.driver},
                                           {"runtime", b.gpu.runtime},
                                           {"peak_gbs", b.gpu.peak_gbytes},
                                           {"clocks", to_json(b.clocks)}}},
          {"peak_gflops", b.roof.gflops},
          {"peak_gflops_thread", b.roof.gflops_thread},
          {"bandwidth_gbs", b.roof.memory_gbytes()},
          {"bandwidth_levels", std::move(levels)},
          {"version", info.version},
          {"commit", info.commit},
          {"compiler", info.compiler},
          {"flags", info.flags},
          {"build_type", info.build_type}};
}

Json to_json(const BenchRun& b) {
  Json results = Json::array();
  for (const BenchRow& r : b.rows) {
    const auto size = [&](const char* key, const char* otherwise = "") -> Json {
      auto it = r.sizes.dims.find(key);
      if (it == r.sizes.dims.end()) it = r.sizes.dims.find(otherwise);
      return it == r.sizes.dims.end() ? Json(nullptr) : Json(it->second);
    };
    const auto ms = [&](double x) { return r.n > 0 ? Json(x) : Json(nullptr); };
    Json row = {{"op", r.op}, {"mode", r.mode}, {"shape", r.shape}};
    row["B"] = size("B").is_null() ? Json(1) : size("B");
    row["T"] = size("T").is_null() && !r.sizes.cu_seqlens.empty() ? Json(r.sizes.cu_seqlens.back()) : size("T");
    row["H"] = size("H");
    row["D"] = size("D");
    row["K"] = size("K", "D");
    row["V"] = size("V", "D");
    row["HV"] = size("HV", "H");
    for (const char* key : {"HQ", "M", "L", "S"})
      if (!size(key).is_null()) row[key] = size(key);
    row["cu_seqlens"] = r.sizes.cu_seqlens.empty() ? Json(nullptr) : Json(r.sizes.cu_seqlens);
    row["dtype"] = b.dtype;
    row["device"] = b.device;
    row["backend"] = r.backend.empty() ? Json(nullptr) : Json(r.backend);
    row["kernel"] = r.kernel.empty() ? Json(nullptr) : Json(r.kernel);
    row["threads"] = b.threads;
    row["seed"] = kBenchSeed;
    row["commit"] = build_info().commit;
    row["checked"] = r.checked;
    row["median_ms"] = ms(r.median);
    row["p10_ms"] = ms(r.p10);
    row["p20_ms"] = ms(r.p20);
    row["p80_ms"] = ms(r.p80);
    row["p90_ms"] = ms(r.p90);
    row["n"] = r.n;
    row["host_us"] = r.host_us > 0 ? Json(r.host_us) : Json(nullptr);
    row["peak_bytes"] = r.peak_bytes;
    row["workspace_bytes"] = r.workspace_bytes;
    row["floor_ms"] = r.floor > 0 ? Json(r.floor) : Json(nullptr);
    row["share"] = r.floor > 0 && r.n > 0 && r.floor <= r.median ? Json(r.floor / r.median) : Json(nullptr);
    row["gflops"] = r.flops > 0 && r.n > 0 ? Json(r.flops / r.median * 1e-6) : Json(nullptr);
    row["err"] = number(r.err);
    row["error"] = r.error.empty() ? Json(nullptr) : Json(r.error);
    results.push_back(std::move(row));
  }
  return {{"machine", machine_json(b)}, {"results", std::move(results)}};
}

void print_bench(const BenchRun& b) {
  const BuildInfo& info = build_info();
  if (b.device == "cpu")
    print("{}, {}, {}: {:.1f} GFLOP/s F32 ({:.1f} one thread), {:.1f} GB/s read from memory\n", b.machine.cpu,
          b.machine.isa, threads_text(b.threads), b.roof.gflops, b.roof.gflops_thread, b.roof.memory_gbytes());
  else
    print(
        "{}, driver {}, runtime {}: {:.0f} GB/s at most; times are the device's, cache replaced before each call\n"
        "clocks: {}\n",
        b.gpu.name, b.gpu.driver, b.gpu.runtime, b.gpu.peak_gbytes, b.clocks.text());
  print("fla {} ({}), {} {}, {} inputs\n", info.version, info.commit, info.compiler, info.build_type, b.dtype);
  std::string op;
  std::vector<std::vector<std::string>> rows;
  const auto flush = [&] {
    if (rows.empty()) return;
    print("\n{}\n", op);
    print_table(rows, {3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13});
    rows.clear();
  };
  for (const BenchRow& r : b.rows) {
    if (r.op != op) {
      flush();
      op = r.op;
      rows.push_back({"  shape", "mode", "backend", "median ms", "p10", "p90", "n", "GFLOP/s", "of peak", "of roofline",
                      "memory", "workspace", "host us", "R", ""});
    }
    const double gflops = r.n > 0 ? r.flops / r.median * 1e-6 : 0.0;
    const bool model = r.flops > 0 && r.n > 0;
    const bool share = r.floor > 0 && r.n > 0 && r.floor <= r.median;
    const auto ms = [&](double x) {
      return r.n == 0 ? std::string("-") : fmt::format("{:.{}f}", x, x < 1 ? 4 : x < 100 ? 3 : 1);
    };
    rows.push_back({"  " + r.shape, r.mode, r.backend.empty() ? "-" : r.backend + "/" + r.kernel, ms(r.median),
                    ms(r.p10), ms(r.p90), std::to_string(r.n), model ? fmt::format("{:.1f}", gflops) : "-",
                    model && share && b.roof.gflops > 0 ? fmt::format("{:.0f}%", 100 * gflops / b.roof.gflops) : "-",
                    share ? fmt::format("{:.0f}%", 100 * r.floor / r.median) : "-",
                    bytes_text(static_cast<double>(r.peak_bytes)), bytes_text(static_cast<double>(r.workspace_bytes)),
                    r.host_us > 0 ? fmt::format("{:.1f}", r.host_us) : "-", fmt::format("{:.1g}", r.err),
                    r.error.empty() ? "" : "FAILED: " + r.error});
  }
  flush();
}

}  // namespace fla::tools
