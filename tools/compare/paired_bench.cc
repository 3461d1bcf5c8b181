#include "tools/compare/paired_bench.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <optional>

#include "tools/call_sizes.h"
#include "tools/common/compare.h"
#include "tools/common/no_memory.h"
#include "tools/compare/process.h"
#include "tools/compare/stopwatch.h"
#include "tools/gpu/device.h"
#include "tools/shape_groups.h"

namespace fla::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostPairs = 2000;
constexpr double kRowMs = 6000.0;       // of one row, both sides together, when its interval stays above kNarrow
constexpr double kMostRowMs = 20000.0;  // and when it stays above kWide
constexpr double kOfThatOnGpu = 0.3;    // where most of it is copies, and the clock is exact
constexpr double kNarrow = 0.004;       // half width at which a row has been timed enough
constexpr double kWide = 0.03;
constexpr double kSampleMs = 1.0;  // short calls are timed several at once
constexpr int kCallsOnGpu = 4;
constexpr double kTurnMs = 100.0;
constexpr double kShortMs = 20.0;
constexpr double kReferenceMs = 8000.0;  // of the reference on the timed shape; beyond it a smaller one stands in
constexpr std::uint64_t kOtherSeed = kBenchSeed + 1;

double since_ms(Clock::time_point t0) { return std::chrono::duration<double, std::milli>(Clock::now() - t0).count(); }

double load_average() {
  double load[1] = {0.0};
  return getloadavg(load, 1) == 1 ? load[0] : 0.0;
}

// The device's own clock. Before each call what the second-level cache holds is replaced, by a write that takes longer
// than the call's launches; the first call, which finds the device idle, is not timed.
class DeviceClock final : public SampleClock {
 public:
  explicit DeviceClock(Device device)
      : flush_(check(gpu::allocate(4 * check(gpu::device_info(device.index)).l2_bytes, device.index))),
        device_(device) {}
  std::size_t take(int calls, const std::function<void()>& call) override {
    while (timers_.size() < static_cast<std::size_t>(calls))
      timers_.push_back(gpu::make_timer({nullptr, device_.index}));
    flush();
    call();
    for (int i = 0; i < calls; ++i) {
      flush();
      gpu::Timer& t = *timers_[static_cast<std::size_t>(i)];
      t.start();
      call();
      t.stop();
    }
    double ms = 0.0;
    for (int i = 0; i < calls; ++i) ms += check(timers_[static_cast<std::size_t>(i)]->milliseconds());
    ms_.push_back(ms);
    return ms_.size() - 1;
  }
  double wall_ms(std::size_t i) const override { return ms_[i]; }
  double took_ms(std::size_t i) const override { return ms_[i]; }
  bool disturbed(std::size_t /*i*/) const override { return false; }

 private:
  void flush() { check(flush_->fill(0, flush_->size(), std::byte{0}, {nullptr, device_.index})); }
  std::unique_ptr<gpu::Memory> flush_;
  Device device_;
  std::vector<std::unique_ptr<gpu::Timer>> timers_;
  std::vector<double> ms_;
};

// Both modes of one side at one shape.
struct Side {
  LoadedCall forward;
  std::unique_ptr<LoadedCall> backward;
  std::size_t workspace = 0;

  Side(const LoadedContext& ctx, const Case& c, bool with_backward) : forward(ctx, c, false) {
    if (with_backward) backward = std::make_unique<LoadedCall>(ctx, c, true);
  }
  // Of calls that are where they will run.
  void ask() { workspace = std::max(forward.workspace(), backward ? backward->workspace() : 0); }
  std::vector<LoadedCall::Output> outputs() const {
    std::vector<LoadedCall::Output> all = forward.outputs();
    if (backward) all.insert(all.end(), backward->outputs().begin(), backward->outputs().end());
    return all;
  }
  void run(std::span<std::byte> memory, bool with_backward) {
    forward.run(memory);
    if (with_backward) backward->run(memory);
  }
};

std::vector<int> processors_here() {
  std::vector<int> list;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return list;
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &set)) list.push_back(i);
  return list;
}

// Both sides' workers are pinned to the same processors, and this thread, which both use, to the first: where the
// system would place each pool for seconds at a time is chance, and on a busy machine it decides more than the code
// does.
class PinnedHere {
 public:
  explicit PinnedHere(const std::vector<int>& processors) {
    CPU_ZERO(&before_);
    if (processors.size() < 2 || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    cpu_set_t first;
    CPU_ZERO(&first);
    CPU_SET(processors.front(), &first);
    pinned_ = sched_setaffinity(0, sizeof first, &first) == 0;
  }
  ~PinnedHere() {
    if (pinned_) sched_setaffinity(0, sizeof before_, &before_);
  }
  PinnedHere(const PinnedHere&) = delete;
  PinnedHere& operator=(const PinnedHere&) = delete;

 private:
  cpu_set_t before_;
  bool pinned_ = false;
};

// What two sides at one shape share: input bytes, output memory, workspace.
struct Shared {
  Case c;
  Device device;
  Side base, candidate;
  std::vector<LoadedCall::Output> names;
  std::size_t forward_outputs;
  std::vector<Buffer> outputs;
  std::unique_ptr<CallMemory> memory;
  std::size_t input_bytes = 0, upstream_bytes = 0, output_bytes = 0, gradient_bytes = 0;

  Shared(const LoadedContext& base_ctx, const LoadedContext& candidate_ctx, Case with, bool backward, Device on)
      : c(std::move(with)),
        device(on),
        base(base_ctx, c, backward),
        candidate(candidate_ctx, c, backward),
        names(candidate.outputs()),
        forward_outputs(candidate.forward.outputs().size()) {
    if (base.outputs() != names) refuse("{}: the two builds do not give the same outputs", c.spec().name);
    for (std::size_t i = 0; i < names.size(); ++i) {
      const bool gradient = i >= forward_outputs;
      outputs.emplace_back(names[i].dtype, names[i].shape);
      (gradient ? gradient_bytes : output_bytes) += bytes_of(outputs.back().view());
      for (Side* s : {&base, &candidate})
        (gradient ? *s->backward : s->forward).bind(names[i].name, outputs.back().view());
    }
    std::vector<LoadedCall*> calls;
    for (Side* s : {&base, &candidate}) {
      calls.push_back(&s->forward);
      if (s->backward) calls.push_back(s->backward.get());
    }
    memory = std::make_unique<CallMemory>(device, std::move(calls));
    for (Side* s : {&base, &candidate}) s->ask();
    for (const auto& name : c.input_names()) input_bytes += bytes_of(c.input(name));
    for (const auto& name : c.upstream_names()) upstream_bytes += bytes_of(c.upstream(name));
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  std::span<std::byte> workspace(const Side& s) const { return memory->workspace().first(s.workspace); }
  bool on_gpu() const { return device.type != DeviceType::Cpu; }
  std::size_t count(bool backward) const { return backward ? names.size() : forward_outputs; }
  void poison_outputs(bool backward) const {
    for (std::size_t i = 0; i < count(backward); ++i) memory->poison(outputs[i]);
  }
  std::vector<Buffer> copy_outputs(bool backward) const {
    std::vector<Buffer> copies;
    for (std::size_t i = 0; i < count(backward); ++i) {
      if (const std::string bad = memory->fetch(outputs[i]); !bad.empty()) refuse("{}: {}", names[i].name, bad);
      copies.push_back(clone(outputs[i].view()));
    }
    return copies;
  }
  std::size_t peak(const Side& s, bool backward) const {
    return s.workspace + input_bytes + output_bytes + (backward ? upstream_bytes + gradient_bytes : 0);
  }
  // Names the first output that is not what it should be; empty when all are.
  std::string differing(const std::vector<Buffer>& expected, bool backward) const {
    std::string beside;
    for (std::size_t i = 0; i < count(backward); ++i) {
      const std::string bad = memory->fetch(outputs[i]);
      if (std::memcmp(outputs[i].view().data, expected[i].view().data, bytes_of(outputs[i].view())) != 0)
        return names[i].name;
      if (!bad.empty() && beside.empty()) beside = fmt::format("{} ({})", names[i].name, bad);
    }
    return beside.empty() ? memory->look_beside_workspace() : beside;
  }
};

struct Timed {
  PairedRow* row;
  Shared* shared;
  bool backward;
  std::vector<Buffer> expected_base, expected_new;
  int calls = 1;                                           // in one sample
  double spent = 0.0, last = 0.0;                          // ms
  std::vector<std::pair<std::size_t, std::size_t>> pairs;  // of the stopwatch's samples: base, candidate
  double half_width = std::numeric_limits<double>::infinity();
  bool done() const {
    if (!row->error.empty() || pairs.size() >= kMostPairs) return true;
    if (pairs.size() < kLeastPairs) return false;
    const double most = half_width <= kWide ? kRowMs : kMostRowMs;
    return half_width <= kNarrow || spent >= (shared->on_gpu() ? kOfThatOnGpu * most : most);
  }
  // As the waits are known now.
  void take_samples(const SampleClock& watch) {
    row->base.clear();
    row->candidate.clear();
    double wall = 0.0, took = 0.0;
    for (const auto& [a, b] : pairs) {
      row->base.push_back({watch.took_ms(a) / calls, watch.disturbed(a)});
      row->candidate.push_back({watch.took_ms(b) / calls, watch.disturbed(b)});
      wall += watch.wall_ms(a) + watch.wall_ms(b);
      took += watch.took_ms(a) + watch.took_ms(b);
    }
    row->taken_off = wall > 0 ? 1 - took / wall : 0.0;
    half_width = paired(row->base, row->candidate).half_width;
  }
};

// One sample of a side: NaN into the outputs, the timed calls, the comparison of what they left. Its index in `watch`.
std::size_t sample(Timed& t, bool of_base, SampleClock& watch) {
  const Shared& s = *t.shared;
  Side& side = of_base ? t.shared->base : t.shared->candidate;
  const auto t0 = Clock::now();
  s.poison_outputs(t.backward);
  const auto workspace = s.workspace(side);
  const std::size_t index = watch.take(t.calls, [&] { side.run(workspace, t.backward); });
  if (const std::string bad = s.differing(of_base ? t.expected_base : t.expected_new, t.backward); !bad.empty())
    t.row->error =
        fmt::format("{}: {} of a timed run is not what the first run gave", of_base ? "base" : "candidate", bad);
  t.last = watch.wall_ms(index);
  t.spent += s.on_gpu() ? since_ms(t0) : t.last;  // the copies take longer than the calls
  return index;
}

// The first run of each side: what all timed ones must repeat, and whether the two agree at this very shape.
void first_runs(Timed& t, DType dtype) {
  Shared& s = *t.shared;
  const FunctionSpec& spec = s.c.spec();
  for (Side* side : {&s.base, &s.candidate}) {
    const bool is_base = side == &s.base;
    const char* who = is_base ? "base" : "candidate";
    s.memory->take_inputs();
    s.poison_outputs(t.backward);
    side->run(s.workspace(*side), t.backward);
    auto& kept = is_base ? t.expected_base : t.expected_new;
    kept = s.copy_outputs(t.backward);
    for (std::size_t i = 0; i < kept.size() && t.row->error.empty(); ++i)
      if (!all_finite(kept[i].view()))
        t.row->error = fmt::format("{}: {} has NaN or infinity, or was not written", who, s.names[i].name);
  }
  for (std::size_t i = 0; i < t.expected_new.size() && t.row->error.empty(); ++i) {
    const bool gradient = i >= s.forward_outputs;
    const FunctionSpec& of = gradient ? Registry::global().find(spec.backward)->spec : spec;
    const double limit = 2 * limit_of(of, s.names[i].name, dtype);  // each may be one limit off the truth
    const Difference d = compare(t.expected_base[i].view(), t.expected_new[i].view(), {.R = limit, .zero = limit});
    if (!d.ok)
      t.row->error = fmt::format("{} differs from the base's at this shape: R {:.3g}, limit {:.3g}: skipped work?",
                                 s.names[i].name, d.R, d.limit);
  }
  if (s.on_gpu()) {
    t.calls = kCallsOnGpu;
    return;
  }
  const auto t0 = Clock::now();
  s.base.run(s.workspace(s.base), t.backward);
  const double once = since_ms(t0);
  t.calls = static_cast<int>(std::clamp(std::ceil(kSampleMs / std::max(once, 1e-4)), 1.0, 1e5));
}

// The same memory with other contents: a side that kept anything of an earlier call gives itself away.
void other_contents(Timed& t, const Case& other, DType dtype) {
  Shared& s = *t.shared;
  for (const auto& name : s.c.input_names())
    std::memcpy(s.c.input(name).data, other.input(name).data, bytes_of(s.c.input(name)));
  s.memory->take_inputs();
  s.poison_outputs(t.backward);
  s.base.run(s.workspace(s.base), t.backward);
  const auto expected = s.copy_outputs(t.backward);
  s.poison_outputs(t.backward);
  s.candidate.run(s.workspace(s.candidate), t.backward);
  const auto got = s.copy_outputs(t.backward);
  for (std::size_t i = 0; i < expected.size() && t.row->error.empty(); ++i) {
    const FunctionSpec& of = i >= s.forward_outputs ? Registry::global().find(s.c.spec().backward)->spec : s.c.spec();
    const double limit = 2 * limit_of(of, s.names[i].name, dtype);
    const Difference d = compare(expected[i].view(), got[i].view(), {.R = limit, .zero = limit});
    if (!d.ok)
      t.row->error = fmt::format("{} does not follow new contents in the same memory: R {:.3g}: kept from before?",
                                 s.names[i].name, d.R);
  }
}

// The largest R of either side against the reference in double.
struct Errors {
  double base = 0, candidate = 0;
  std::string on, problem;
};

void take_errors(const LoadedContext& ctx, const Case& c, bool backward, Device device, const Outcome& expected,
                 const std::string& who, double& worst, std::string& problem) {
  LoadedCall call(ctx, c, backward);
  std::vector<Buffer> outputs;
  for (const auto& o : call.outputs()) {
    outputs.emplace_back(o.dtype, o.shape);
    call.bind(o.name, outputs.back().view());
  }
  const CallMemory memory(device, {&call});
  call.run(memory.workspace());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const std::string& name = call.outputs()[i].name;
    if (const std::string bad = memory.fetch(outputs[i]); !bad.empty() && problem.empty())
      problem = fmt::format("{}: {}: {}", who, name, bad);
    const FunctionSpec& spec = backward ? Registry::global().find(c.spec().backward)->spec : c.spec();
    const double limit = limit_of(spec, name, c.options().dtype);
    const Difference d = compare(expected[name], outputs[i].view(), {.R = limit, .zero = std::max(limit, 1e-5)});
    if (!d.zero_reference) worst = std::isnan(d.R) || d.R > worst ? d.R : worst;
    if (!d.ok && problem.empty())
      problem = fmt::format("{} against the reference: {}: R {:.3g}, limit {:.3g}", who, name, d.R, d.limit);
  }
}

Errors errors_against_double(const LoadedContext& base, const LoadedContext& candidate, const Context& reference,
                             const Case& c, bool backward, Device device) {
  Errors e;
  const Case wide = c.widen(DType::F64);
  for (const bool back : {false, true}) {
    if (back && !backward) continue;
    const Outcome expected = back ? wide.run_backward(reference) : wide.run(reference);
    if (!expected.ok()) {
      e.problem = "reference: " + expected.problem();
      return e;
    }
    take_errors(base, c, back, device, expected, "base", e.base, e.problem);
    take_errors(candidate, c, back, device, expected, "candidate", e.candidate, e.problem);
  }
  return e;
}

// On the timed shape where the reference can do that in time: all of it, or one head; else on the shape cut down, whose
// reference is timed first to tell.
Errors errors_at(const LoadedContext& base, const LoadedContext& candidate, const Context& reference, const Case& c,
                 const std::string& shape, bool backward, Device device) {
  const FunctionSpec& spec = c.spec();
  const Case small = bench_case(spec, cut_down(c.sizes()), c.options().dtype).prepared();
  const auto t0 = Clock::now();
  Errors e = errors_against_double(base, candidate, reference, small, backward, device);
  e.on = "a part of " + shape;
  const double small_ms = since_ms(t0);
  const auto volume = [](const Case& x) {
    double n = 0.0;
    for (const auto& name : x.input_names()) n += static_cast<double>(x.input(name).numel());
    return n;
  };
  const double whole_ms = small_ms * volume(c) / volume(small);
  const bool heads = uses(spec, "H") && !uses(spec, "HV") && !uses(spec, "HQ") && c.sizes().H > 1;
  Errors full;
  if (whole_ms <= kReferenceMs) {
    full = errors_against_double(base, candidate, reference, c, backward, device);
    full.on = shape;
  } else if (heads && whole_ms / static_cast<double>(c.sizes().H) <= kReferenceMs) {
    // Strided views of one head: a copy of its own lets the fast paths serve it.
    Case head = c.head(c.sizes().H - 1);
    for (const auto& name : head.input_names()) head = head.with(name, head.input(name));
    for (const auto& name : head.upstream_names()) head = head.with_upstream(name, head.upstream(name));
    full = errors_against_double(base, candidate, reference, head, backward, device);
    full.on = shape + ", one head";
  } else {
    return e;
  }
  if (!e.problem.empty()) full.problem = e.problem;
  // The ratio that speaks most against the candidate is the one that is kept.
  return e.candidate * full.base > full.candidate * e.base ? e : full;
}

void measure(std::deque<Timed>& rows, PairedRun& run, SampleClock& watch, Progress& progress,
             const std::string& where) {
  const std::uint64_t order = stream_of(kBenchSeed, "order of pairs");
  std::uint64_t pair = 0;
  for (int round = 1;; ++round) {
    std::size_t done = 0;
    for (Timed& t : rows) {
      if (t.done()) {
        ++done;
        continue;
      }
      throw_if_interrupted();
      // Whoever ran before has left its own data in the caches; a long call does not notice.
      if (t.last < kShortMs && !t.shared->on_gpu()) {
        sample(t, true, watch);
        sample(t, false, watch);
      }
      const auto t0 = Clock::now();
      do {
        // Who is first in a pair is drawn: load that follows a rhythm of its own must not meet one side more often.
        const bool base_first = uniform(order, pair++) < 0.5;
        const std::size_t first = sample(t, base_first, watch), second = sample(t, !base_first, watch);
        t.pairs.emplace_back(base_first ? first : second, base_first ? second : first);
      } while (!t.done() && since_ms(t0) < kTurnMs);
      t.take_samples(watch);
    }
    if (const double mhz = machine().mhz; mhz > 0) run.mhz.push_back(mhz);
    progress.show(fmt::format("verify: {} round {}, {} of {} rows done", where, round, done, rows.size()));
    if (done == rows.size()) break;
  }
  for (Timed& t : rows) t.take_samples(watch);  // waits that ended in another row's turn
}

void finish(Timed& t, const PairedRun& run, bool same_flags) {
  PairedRow& r = *t.row;
  const Shared& s = *t.shared;
  const auto backend = [&](const Side& side) {
    std::string b = side.forward.backend();
    if (t.backward && side.backward->backend() != b) b += "+" + side.backward->backend();
    return b;
  };
  r.backend_base = backend(s.base);
  r.backend_new = backend(s.candidate);
  r.peak_base = s.peak(s.base, t.backward);
  r.peak_new = s.peak(s.candidate, t.backward);
  r.flops = flops_of(check(s.c.call()), s.c.sizes());
  r.bytes = static_cast<double>(s.input_bytes + s.output_bytes);
  if (t.backward) {
    const double back = flops_of(check(s.c.backward_call()), s.c.sizes());
    r.flops = r.flops > 0 && back > 0 ? r.flops + back : 0.0;
    r.bytes += static_cast<double>(s.input_bytes + s.upstream_bytes + s.gradient_bytes);
  }
  if (s.on_gpu())
    r.floor = run.gpu.peak_gbytes > 0 ? r.bytes / run.gpu.peak_gbytes * 1e-6 : 0.0;
  else if (r.flops > 0)
    r.floor = floor_ms(run.roof, r.flops, r.bytes);
  // A row that was not timed may still say why not to believe the candidate.
  if (!r.candidate.empty()) r.stats = paired(r.base, r.candidate);
  r.flags = blocking_flags({.base_ms = r.stats.base.median,
                            .new_ms = r.stats.candidate.median,
                            .floor_ms = r.floor,
                            .err_base = r.err_base,
                            .err_new = r.err_new,
                            .same_flags = same_flags});
}

struct Job {
  const Registry::Entry* entry;
  const NamedShape* shape;
  Sizes sizes;
  bool backward = false;
  std::vector<std::size_t> rows;
};

}  // namespace

bool PairedRow::blocked() const { return !error.empty() || !flags.empty(); }

bool PairedRun::blocked() const {
  return rows.empty() || std::any_of(rows.begin(), rows.end(), [](const PairedRow& r) { return r.blocked(); });
}

std::vector<Paired> PairedRun::paired_rows() const {
  std::vector<Paired> list;
  for (const PairedRow& r : rows)
    if (r.stats.n > 0 && r.error.empty()) list.push_back(r.stats);
  return list;
}

PairedRun run_paired(const std::vector<const Registry::Entry*>& ops, const BenchOptions& o,
                     const std::shared_ptr<LoadedLibrary>& base, const std::shared_ptr<LoadedLibrary>& candidate,
                     bool same_flags) {
  validate(ops, o);
  const std::vector<NamedShape> shapes = bench_shapes(o.shapes, o.custom_shapes, o.varlen);
  const std::vector<std::string> modes = parse_modes(o.modes.empty() ? "fwd,fwdbwd" : o.modes);
  const DType dtype = parse_dtype(o.call.dtype);
  PairedRun run;
  run.dtype = o.call.dtype;
  std::vector<Job> jobs;
  for (const Registry::Entry* e : ops)
    for (const NamedShape& shape : shapes) {
      const FunctionSpec& spec = e->spec;
      if (skips(spec, shape, ops.size())) continue;
      Job job{e, &shape, sizes_for(spec, shape), false, {}};
      for (const auto& mode : modes) {
        const bool backward = mode == "fwdbwd";
        if (backward && spec.backward.empty() && o.modes.empty()) continue;
        PairedRow row;
        row.op = spec.name;
        row.mode = mode;
        row.shape = shape.name;
        row.sizes = shape;
        if (backward && spec.backward.empty())
          row.error = "has no backward";
        else
          job.backward |= backward, job.rows.push_back(run.rows.size());
        run.rows.push_back(std::move(row));
      }
      jobs.push_back(std::move(job));
    }

  const std::vector<int> processors = processors_here();
  const LoadedContext base_ctx(base, o.call, processors), candidate_ctx(candidate, o.call, processors);
  CallOptions by_reference = o.call;
  by_reference.backend = kReference;
  const Context reference(context_options(by_reference));
  run.threads = reference.threads();
  run.machine = run.after = machine();
  run.load_before = load_average();
  if (run.rows.empty()) return run;
  Progress progress;
  const Device device = device_of(o.call);
  std::optional<GpuWatch> gpu_watch;
  if (device.type == DeviceType::Cpu) {
    progress.show("verify: measuring the machine");
    run.roof = measure_roof(reference.pool());
  } else {
    run.device = o.call.device;
    run.gpu = check(gpu::device_text(device.index));
    check(gpu::synchronize(device.index));  // so that this process counts as one that computes there
    gpu_watch.emplace(run.gpu.pci);
  }

  const double most = 0.8 * static_cast<double>(run.machine.available_bytes);
  const double together = std::min(most / 2, 4.0 * 1024 * 1024 * 1024);
  // Outputs lie three times in memory: in use, and what each side's first run gave.
  const auto estimate = [&](const Job& j) { return 2.0 * estimate_bytes(j.entry->spec, j.sizes, dtype, j.backward); };
  for (std::size_t begin = 0; begin < jobs.size();) {
    std::size_t end = begin;
    for (double sum = 0.0; end < jobs.size() && (end == begin || sum + estimate(jobs[end]) <= together); ++end)
      sum += estimate(jobs[end]);
    const std::string where =
        end - begin == jobs.size() ? "" : fmt::format("[{}-{} of {}]", begin + 1, end, jobs.size());
    std::vector<std::unique_ptr<Shared>> shared;
    std::deque<Timed> timed;
    for (std::size_t j = begin; j < end; ++j) {
      const Job& job = jobs[j];
      const FunctionSpec& spec = job.entry->spec;
      const auto fail = [&](const std::string& text) {
        for (const std::size_t i : job.rows) run.rows[i].error = text;
      };
      if (job.rows.empty()) continue;
      throw_if_interrupted();
      if (estimate(job) > most) {
        fail(fmt::format("needs about {}, {} available", bytes_text(estimate(job)),
                         bytes_text(static_cast<double>(run.machine.available_bytes))));
        continue;
      }
      progress.show(fmt::format("verify: {} checking {} {}", where, spec.name, job.shape->name));
      try {
        Case c = bench_case(spec, job.sizes, dtype);
        if (job.backward) c = c.prepared();
        const Errors e = errors_at(base_ctx, candidate_ctx, reference, c, job.shape->name, job.backward, device);
        shared.push_back(std::make_unique<Shared>(base_ctx, candidate_ctx, std::move(c), job.backward, device));
        for (const std::size_t i : job.rows) {
          PairedRow& row = run.rows[i];
          row.err_base = e.base;
          row.err_new = e.candidate;
          row.err_on = e.on;
          row.error = e.problem;
          timed.push_back({&row, shared.back().get(), row.mode == "fwdbwd", {}, {}});
          if (row.error.empty()) first_runs(timed.back(), dtype);
        }
      } catch (const Stop& e) {  // this shape's failure, not the run's
        fail(e.what());
      } catch (const std::bad_alloc& e) {
        fail(memory_text(e));
      }
    }
    try {
      if (gpu_watch) {
        const GpuWatch::During during(*gpu_watch);
        DeviceClock watch(device);
        measure(timed, run, watch, progress, where);
      } else {
        const PinnedHere pinned(o.call.threads == 1 ? std::vector<int>{} : processors);
        Stopwatch watch(run.threads == 1);
        measure(timed, run, watch, progress, where);
        run.roof.include(measure_roof(reference.pool()));  // beside the rows: the machine may have been busy before
      }
    } catch (const Stop& e) {
      for (Timed& t : timed)
        if (t.row->error.empty() && !t.done()) t.row->error = e.what();
    }
    for (Timed& t : timed) {
      if (t.row->error.empty() && !t.row->candidate.empty()) {
        const Case other = bench_case(t.shared->c.spec(), t.shared->c.sizes(), dtype, kOtherSeed);
        other_contents(t, other, dtype);
      }
      finish(t, run, same_flags);
    }
    begin = end;
  }
  if (gpu_watch) run.clocks = gpu_watch->finish();
  run.after = machine();
  run.load_after = load_average();
  return run;
}

Json machine_json(const PairedRun& r) {
  BenchRun b;
  b.machine = r.machine;
  b.after = r.after;
  b.roof = r.roof;
  b.threads = r.threads;
  b.device = r.device;
  b.gpu = r.gpu;
  b.clocks = r.clocks;
  Json j = machine_json(b);
  j["mhz_during"] = r.mhz;
  j["load_before"] = r.load_before;
  j["load_after"] = r.load_after;
  return j;
}

namespace {

Json samples_json(const Samples& s) {
  return {{"median", s.median}, {"mean", s.mean}, {"sd", s.sd}, {"min", s.min},
          {"p10", s.p10},       {"p90", s.p90},   {"n", s.n}};
}

// Readings this far apart say little about a small change.
bool noisy(const PairedRow& r) { return r.stats.n > 0 && r.stats.high - r.stats.low > 0.1 * r.stats.speedup; }

constexpr const char* kNoisy = "noisy";
constexpr const char* kOtherBackend = "backend ";

// The row's blocking flags, and what is told besides.
std::vector<std::string> shown_flags(const PairedRow& r) {
  std::vector<std::string> flags = r.flags;
  if (noisy(r)) flags.emplace_back(kNoisy);
  if (r.stats.n > 0 && r.backend_base != r.backend_new)
    flags.push_back(kOtherBackend + r.backend_base + " -> " + r.backend_new);
  return flags;
}

std::vector<std::string> notes_of(const PairedRow& r) {
  std::vector<std::string> notes = shown_flags(r);
  if (r.stats.timed > r.stats.n) notes.push_back(fmt::format("{} pairs disturbed", r.stats.timed - r.stats.n));
  if (r.taken_off > 0.01) notes.push_back(fmt::format("{:.0f} % waiting taken off", 100 * r.taken_off));
  return notes;
}

}  // namespace

Json rows_json(const PairedRun& run) {
  Json rows = Json::array();
  for (const PairedRow& r : run.rows) {
    const bool measured = r.stats.n > 0 && r.error.empty();
    const auto if_measured = [&](double x) { return measured ? number(x) : Json(nullptr); };
    Json row = {{"op", r.op}, {"mode", r.mode}, {"shape", r.shape}, {"dtype", run.dtype}};
    row["backend"] = r.backend_new.empty() ? Json(nullptr) : Json(r.backend_new);
    row["backend_base"] = r.backend_base.empty() ? Json(nullptr) : Json(r.backend_base);
    row["base_ms"] = if_measured(r.stats.base.median);
    row["new_ms"] = if_measured(r.stats.candidate.median);
    row["speedup"] = if_measured(r.stats.speedup);
    row["p10"] = if_measured(r.stats.p10);
    row["p90"] = if_measured(r.stats.p90);
    row["low"] = if_measured(r.stats.low);
    row["high"] = if_measured(r.stats.high);
    row["n"] = r.stats.n;
    row["timed"] = r.stats.timed;
    row["taken_off"] = if_measured(r.taken_off);
    row["verdict"] = !measured ? "blocked" : r.stats.faster() ? "faster" : r.stats.slower() ? "slower" : "same";
    row["peak_base"] = r.peak_base;
    row["peak_new"] = r.peak_new;
    row["err_base"] = number(r.err_base);
    row["err_new"] = number(r.err_new);
    row["err_on"] = r.err_on;
    row["floor_ms"] = r.floor > 0 ? Json(r.floor) : Json(nullptr);
    row["share_base"] = r.floor > 0 && measured ? Json(r.floor / r.stats.base.median) : Json(nullptr);
    row["share"] = r.floor > 0 && measured ? Json(r.floor / r.stats.candidate.median) : Json(nullptr);
    row["flops"] = r.flops > 0 ? Json(r.flops) : Json(nullptr);
    row["bytes"] = r.bytes;
    row["stats_base"] = measured ? samples_json(r.stats.base) : Json(nullptr);
    row["stats_new"] = measured ? samples_json(r.stats.candidate) : Json(nullptr);
    row["error"] = r.error.empty() ? Json(nullptr) : Json(r.error);
    row["flags"] = shown_flags(r);
    rows.push_back(std::move(row));
  }
  return rows;
}

bool blocks(const std::string& flag) { return flag != kNoisy && !flag.starts_with(kOtherBackend); }

Verdict verdict_of_rows(const Json& rows) {
  const auto real = [](const Json& row, const char* key, double missing) {
    const auto it = row.find(key);
    return it != row.end() && it->is_number() ? it->get<double>() : missing;
  };
  std::vector<Paired> paired;
  for (const Json& row : rows) {
    const auto error = row.find("error"), flags = row.find("flags");
    Paired p;
    p.speedup = real(row, "speedup", 0.0);
    p.low = real(row, "low", 0.0);
    p.high = real(row, "high", std::numeric_limits<double>::infinity());
    if (error == row.end() || !error->is_null() || flags == row.end() || !(p.speedup > 0.0)) return Verdict::Blocked;
    for (const Json& f : *flags)
      if (blocks(f.get<std::string>())) return Verdict::Blocked;
    paired.push_back(p);
  }
  return verdict_of(paired, false);
}

void print_paired(const PairedRun& run) {
  std::string op;
  std::vector<std::vector<std::string>> rows;
  const auto flush = [&] {
    if (rows.empty()) return;
    print("\n{}\n", op);
    print_table(rows, {2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
    rows.clear();
  };
  const auto ms = [](double x) { return fmt::format("{:.{}f}", x, x < 1 ? 4 : x < 100 ? 3 : 1); };
  for (const PairedRow& r : run.rows) {
    if (r.op != op) {
      flush();
      op = r.op;
      rows.push_back({"  shape", "mode", "base ms", "new ms", "speedup", "interval", "p10", "p90", "n", "memory base",
                      "new", "R base", "R new", ""});
    }
    if (!r.error.empty() || r.stats.n == 0) {
      rows.push_back(
          {"  " + r.shape, r.mode, "-", "-", "-", "-", "-", "-", "0", "-", "-", "-", "-", "FAILED: " + r.error});
      continue;
    }
    rows.push_back({"  " + r.shape, r.mode, ms(r.stats.base.median), ms(r.stats.candidate.median),
                    fmt::format("{:.3f}", r.stats.speedup), fmt::format("[{:.3f}, {:.3f}]", r.stats.low, r.stats.high),
                    fmt::format("{:.3f}", r.stats.p10), fmt::format("{:.3f}", r.stats.p90), std::to_string(r.stats.n),
                    bytes_text(static_cast<double>(r.peak_base)), bytes_text(static_cast<double>(r.peak_new)),
                    fmt::format("{:.2g}", r.err_base), fmt::format("{:.2g}", r.err_new), join(notes_of(r))});
  }
  flush();
}

}  // namespace fla::tools
