#include "tools/report/profile.h"

#include <cxxabi.h>
#include <linux/perf_event.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string_view>

#include "tools/call_sizes.h"
#include "tools/common/compare.h"
#include "tools/compare/paired_stats.h"
#include "tools/compare/process.h"
#include "tools/shape_groups.h"

namespace fla::tools {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kWindowMs = 1000.0;
constexpr std::size_t kMostSamples = 1 << 16;
constexpr std::size_t kEnoughSamples = 400;
constexpr int kMostWindows = 5;
constexpr std::size_t kShown = 8;
// Nearer to a roof than this share, the roof is what limits.
constexpr double kAtRoof = 0.6;

// Counts of this thread and of those that it starts afterwards.
class PerfCounters {
 public:
  PerfCounters() {
    struct Event {
      const char* name;
      std::uint64_t config;
    };
    for (const Event& e :
         {Event{"cycles", PERF_COUNT_HW_CPU_CYCLES}, Event{"instructions", PERF_COUNT_HW_INSTRUCTIONS},
          Event{"cache references", PERF_COUNT_HW_CACHE_REFERENCES}, Event{"cache misses", PERF_COUNT_HW_CACHE_MISSES},
          Event{"branch misses", PERF_COUNT_HW_BRANCH_MISSES}}) {
      perf_event_attr a{};
      a.size = sizeof a;
      a.type = PERF_TYPE_HARDWARE;
      a.config = e.config;
      a.disabled = 1;
      a.inherit = 1;
      a.exclude_kernel = 1;
      a.exclude_hv = 1;
      const auto fd = static_cast<int>(syscall(SYS_perf_event_open, &a, 0, -1, -1, PERF_FLAG_FD_CLOEXEC));
      if (fd >= 0)
        open_.push_back({e.name, fd});
      else if (missing_.empty())
        missing_ = std::string(std::strerror(errno));
    }
    if (!open_.empty()) missing_.clear();
  }
  ~PerfCounters() {
    for (const auto& c : open_) close(c.fd);
  }
  PerfCounters(const PerfCounters&) = delete;
  PerfCounters& operator=(const PerfCounters&) = delete;

  const std::string& missing() const { return missing_; }
  void start() {
    for (const auto& c : open_) {
      ioctl(c.fd, PERF_EVENT_IOC_RESET, 0);
      ioctl(c.fd, PERF_EVENT_IOC_ENABLE, 0);
    }
  }
  std::vector<Counter> stop(double calls) {
    std::vector<Counter> list;
    for (const auto& c : open_) ioctl(c.fd, PERF_EVENT_IOC_DISABLE, 0);
    for (const auto& c : open_) {
      std::uint64_t n = 0;
      if (read(c.fd, &n, sizeof n) == static_cast<ssize_t>(sizeof n) && n > 0)
        list.push_back({c.name, static_cast<double>(n) / calls});
    }
    if (list.empty() && missing_.empty()) missing_ = "this machine opens counters that do not count";
    return list;
  }

 private:
  struct Open {
    const char* name;
    int fd;
  };
  std::vector<Open> open_;
  std::string missing_;
};

std::array<std::atomic<std::uintptr_t>, kMostSamples> g_where;
std::atomic<std::size_t> g_samples{0};

void take_sample(int, siginfo_t*, void* context) {
  const auto* u = static_cast<const ucontext_t*>(context);
#if defined(__x86_64__)
  const auto at = static_cast<std::uintptr_t>(u->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  const auto at = static_cast<std::uintptr_t>(u->uc_mcontext.pc);
#else
  const std::uintptr_t at = u == nullptr ? 0 : 1;
#endif
  const std::size_t i = g_samples.fetch_add(1, std::memory_order_relaxed);
  if (i < kMostSamples) g_where[i].store(at, std::memory_order_relaxed);
}

// Where the process spends processor time, a thousand times a second, by the timer that every system has.
class Sampler {
 public:
  Sampler() {
    g_samples = 0;
    struct sigaction action {};
    action.sa_sigaction = take_sample;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(SIGPROF, &action, &old_);
    const itimerval every{{0, 1000}, {0, 1000}};
    if (setitimer(ITIMER_PROF, &every, nullptr) != 0) missing_ = std::strerror(errno);
  }
  ~Sampler() {
    const itimerval off{};
    setitimer(ITIMER_PROF, &off, nullptr);
    // Ignoring discards a signal that is still on its way, which would end the process once the handler is gone.
    struct sigaction ignore {};
    ignore.sa_handler = SIG_IGN;
    sigaction(SIGPROF, &ignore, nullptr);
    sigaction(SIGPROF, &old_, nullptr);
  }
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;
  const std::string& missing() const { return missing_; }

 private:
  struct sigaction old_ {};
  std::string missing_;
};

std::string this_program() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).string();
}

// Where this program lies in memory: the lowest address of its file.
std::uintptr_t load_address(const std::string& program) {
  for (const std::string& line : split(read_text("/proc/self/maps"), '\n'))
    if (line.ends_with(program)) return std::strtoull(line.c_str(), nullptr, 16);
  return 0;
}

std::string demangle(const std::string& symbol) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status),
                                                    std::free);
  std::string name = status == 0 && text ? text.get() : symbol;
  constexpr std::string_view kUnnamed = "(anonymous namespace)::";
  for (std::size_t at; (at = name.find(kUnnamed)) != std::string::npos;) name.erase(at, kUnnamed.size());
  name.erase(std::min(name.find('('), name.size()));
  return name.starts_with("void ") ? name.substr(5) : name;
}

std::vector<HotFunction> hottest(std::string& missing, std::size_t& samples) {
  std::vector<HotFunction> list;
  samples = std::min(g_samples.load(), kMostSamples);
  const std::string program = this_program();
  ChildResult nm;
  try {
    nm = run_child({"nm", "--defined-only", "--format=posix", program});
  } catch (const Stop& e) {
    missing = e.what();
    return list;
  }
  std::map<std::uintptr_t, std::string> symbols;
  for (const std::string& line : split(nm.out, '\n')) {
    const auto words = split(line, ' ');
    if (words.size() >= 3 && (words[1] == "t" || words[1] == "T" || words[1] == "W" || words[1] == "w"))
      symbols[std::strtoull(words[2].c_str(), nullptr, 16)] = words[0];
  }
  if (!nm.ok() || symbols.empty()) {
    missing = "this program has no symbols";
    return list;
  }
  const std::uintptr_t begin = load_address(program);
  const std::uintptr_t last = symbols.rbegin()->first + (1 << 20);
  std::map<std::string, std::size_t> count;
  for (std::size_t i = 0; i < samples; ++i) {
    const std::uintptr_t at = g_where[i].load(std::memory_order_relaxed) - begin;
    auto it = symbols.upper_bound(at);
    ++count[it == symbols.begin() || at > last ? "outside the program" : std::prev(it)->second];
  }
  for (const auto& [symbol, n] : count)
    list.push_back({demangle(symbol), static_cast<double>(n) / static_cast<double>(samples)});
  std::sort(list.begin(), list.end(), [](const HotFunction& a, const HotFunction& b) { return a.share > b.share; });
  if (list.size() > kShown) list.resize(kShown);
  return list;
}

struct Work {
  DynamicCall forward, backward;
  std::vector<Buffer> outputs;
  Buffer workspace;
  bool with_backward;
  std::size_t moved = 0;

  Work(const Context& ctx, const Case& c, bool back) : forward(check(c.call())), with_backward(back) {
    std::size_t need = bind(ctx, forward);
    if (back) {
      backward = check(c.backward_call());
      need = std::max(need, bind(ctx, backward));
    }
    workspace = Buffer::bytes(need);
    for (const auto& name : c.input_names()) moved += (back ? 2 : 1) * bytes_of(c.input(name));
  }
  std::size_t bind(const Context& ctx, DynamicCall& call) {
    for (const auto& x : check(call.outputs(ctx))) {
      outputs.emplace_back(x.dtype, x.shape);
      moved += bytes_of(outputs.back().view());
      check(call.bind(x.name, outputs.back().view()));
    }
    return check(call.workspace_bytes(ctx));
  }
  void run(const Context& ctx) const {
    check(forward.run(ctx, workspace.span()));
    if (with_backward) check(backward.run(ctx, workspace.span()));
  }
};

Json custom_shape(const NamedShape& s) {
  Json sizes = Json::object();
  for (const auto& [name, n] : s.dims) sizes[name] = n;
  if (!s.cu_seqlens.empty()) sizes["cu_seqlens"] = s.cu_seqlens;
  return {{s.name, std::move(sizes)}};
}

// The largest share of a peak, over all kernels of the call, each as long as it took.
double weighted(const std::vector<KernelReading>& kernels, double KernelReading::*share) {
  double sum = 0.0, us = 0.0;
  for (const KernelReading& k : kernels)
    if (!std::isnan(k.*share)) {
      sum += k.us * k.*share;
      us += k.us;
    }
  return us > 0 ? sum / us : 0.0;
}

Profile profile_on_gpu(const Registry::Entry& e, const NamedShape& shape, const std::string& mode,
                       const BenchOptions& o) {
  Profile p;
  p.op = e.spec.name;
  p.shape = shape.name;
  p.mode = mode;
  p.device = o.call.device;
  BenchOptions one = o;
  one.shapes.clear();
  one.varlen.clear();
  one.custom_shapes = custom_shape(shape).dump();
  one.modes = mode;
  const BenchRun run = run_bench({&e}, one);
  const BenchRow& row = run.rows.front();
  p.clocks = run.clocks;
  p.gpu = run.gpu.name;
  p.backend = row.backend;
  p.error = row.error;
  p.peak_gbytes = run.gpu.peak_gbytes;
  p.floor_ms = row.floor;
  p.limit = "neither";
  if (!row.ok()) {
    p.kernels_missing = "the call failed: " + row.error;
    return p;
  }
  p.median_ms = row.median;
  p.gflops = row.flops / row.median * 1e-6;
  p.gbytes = row.bytes / row.median * 1e-6;

  std::vector<std::string> command = {this_program(),    "bench",    p.op,          "--custom-shapes",
                                      one.custom_shapes, "--modes",  mode,          "--dtype",
                                      o.call.dtype,      "--device", o.call.device, "--once"};
  if (!o.call.backend.empty()) command.insert(command.end(), {"--backend", o.call.backend});
  NcuReadings ncu = run_ncu(command, range_name(p.op, mode, shape.name));
  p.kernels = std::move(ncu.kernels);
  p.kernels_missing = ncu.missing;
  const double memory = p.kernels.empty() ? (p.peak_gbytes > 0 ? p.gbytes / p.peak_gbytes : 0.0)
                                          : weighted(p.kernels, &KernelReading::memory);
  const double compute = weighted(p.kernels, &KernelReading::compute);
  if (std::max(memory, compute) >= kAtRoof) p.limit = compute > memory ? "compute" : "memory";
  return p;
}

Profile profile_one(const Registry::Entry& e, const NamedShape& shape, const std::string& mode, const BenchOptions& o) {
  Profile p;
  p.op = e.spec.name;
  p.shape = shape.name;
  p.mode = mode;
  const bool backward = mode == "fwdbwd";
  PerfCounters counters;  // before the context's threads exist
  const Context ctx(context_options(o.call));
  const Roof roof = measure_roof(ctx.pool());
  const Sizes sizes = sizes_for(e.spec, shape);
  Case c = bench_case(e.spec, sizes, parse_dtype(o.call.dtype));
  if (backward) c = c.prepared();
  const Work work(ctx, c, backward);
  work.run(ctx);
  p.backend = last_route().backend;

  std::vector<double> ms;
  const auto run_for = [&](double window) {
    ms.clear();
    const auto t0 = Clock::now();
    for (Clock::time_point begin = t0;
         ms.size() < 3 || std::chrono::duration<double, std::milli>(begin - t0).count() < window;) {
      throw_if_interrupted();
      work.run(ctx);
      const auto end = Clock::now();
      ms.push_back(std::chrono::duration<double, std::milli>(end - begin).count());
      begin = end;
    }
  };
  counters.start();
  run_for(kWindowMs);
  p.counters = counters.stop(static_cast<double>(ms.size()));
  p.counters_missing = counters.missing();
  std::sort(ms.begin(), ms.end());
  p.median_ms = percentile(ms, 0.5);
  {
    const Sampler sampler;
    // The timer is as fine as the system's tick, and processor time passes slowly on a busy machine.
    for (int part = 0; part < kMostWindows && g_samples < kEnoughSamples; ++part) run_for(kWindowMs);
    p.sampler_missing = sampler.missing();
  }
  p.hot = hottest(p.sampler_missing, p.samples);

  double flops = flops_of(work.forward, sizes);
  if (backward) {
    const double back = flops_of(work.backward, sizes);
    flops = flops > 0 && back > 0 ? flops + back : 0.0;
  }
  const auto bytes = static_cast<double>(work.moved);
  p.gflops = flops / p.median_ms * 1e-6;
  p.gbytes = bytes / p.median_ms * 1e-6;
  p.peak_gflops = roof.gflops;
  p.peak_gbytes = bytes / floor_ms(roof, 0.0, bytes) * 1e-6;
  if (flops > 0) p.floor_ms = floor_ms(roof, flops, bytes);
  const double compute = p.gflops / p.peak_gflops, memory = p.gbytes / p.peak_gbytes;
  p.limit = std::max(compute, memory) < kAtRoof ? "neither" : compute > memory ? "compute" : "memory";
  return p;
}

std::string gpu_reading(const Profile& p) {
  std::string s = fmt::format("{} {} {}: ", p.op, p.shape, p.mode);
  if (!p.error.empty()) return s + "no time: " + p.error;
  s += fmt::format("{:.4g} ms on {}, {:.1f} GFLOP/s, {:.1f} GB/s", p.median_ms, p.gpu, p.gflops, p.gbytes);
  if (p.peak_gbytes > 0) s += fmt::format(" of {:.1f} ({:.0f} %)", p.peak_gbytes, 100 * p.gbytes / p.peak_gbytes);
  if (p.kernels.empty()) return s + "; no readings of kernels (" + p.kernels_missing + ")";
  const auto longest =
      std::max_element(p.kernels.begin(), p.kernels.end(), [](const auto& a, const auto& b) { return a.us < b.us; });
  double all = 0.0;
  for (const KernelReading& k : p.kernels) all += k.us;
  return s + fmt::format("; ncu: {} {}, {:.0f} % of the time in {}: {}", p.kernels.size(),
                         p.kernels.size() == 1 ? "kernel" : "kernels", 100 * longest->us / all, longest->name,
                         longest->text());
}

}  // namespace

std::string Profile::reading() const {
  if (device != "cpu") return gpu_reading(*this);
  std::string s = fmt::format(
      "{} {} {}: {:.4g} ms, {:.1f} of {:.1f} GFLOP/s ({:.0f} %), {:.1f} of {:.1f} GB/s ({:.0f} %)", op, shape, mode,
      median_ms, gflops, peak_gflops, 100 * gflops / peak_gflops, gbytes, peak_gbytes, 100 * gbytes / peak_gbytes);
  if (!counters.empty()) {
    s += "; per call";
    for (const Counter& c : counters) s += fmt::format(" {} {:.4g}", c.name, c.per_call);
  } else {
    s += "; no hardware counters (" + counters_missing + ")";
  }
  if (!hot.empty())
    s += fmt::format("; {:.0f} % of {} samples in {}", 100 * hot.front().share, samples, hot.front().name);
  else
    s += "; no samples (" + sampler_missing + ")";
  return s;
}

std::vector<Profile> take_profiles(const std::vector<const Registry::Entry*>& ops, const BenchOptions& o) {
  const auto shapes = bench_shapes(o.shapes, o.custom_shapes, o.varlen);
  std::vector<Profile> list;
  for (const Registry::Entry* e : ops)
    for (const std::string& mode : parse_modes(o.modes.empty() ? "fwd,fwdbwd" : o.modes))
      if (mode == "fwd" || !e->spec.backward.empty())
        list.push_back(o.call.device == "cpu" ? profile_one(*e, shapes.front(), mode, o)
                                              : profile_on_gpu(*e, shapes.front(), mode, o));
  return list;
}

Json to_json(const Profile& p) {
  const auto text_or_null = [](const std::string& s) { return s.empty() ? Json(nullptr) : Json(s); };
  const auto if_known = [](double x) { return x > 0 ? Json(x) : Json(nullptr); };
  Json j = {{"op", p.op},         {"shape", p.shape},     {"mode", p.mode},
            {"device", p.device}, {"backend", p.backend}, {"median_ms", if_known(p.median_ms)}};
  if (p.device == "cpu") {
    Json counters = Json::object(), hot = Json::array();
    for (const Counter& c : p.counters) counters[c.name] = c.per_call;
    for (const HotFunction& h : p.hot) hot.push_back({{"function", h.name}, {"share", h.share}});
    j["counters"] = p.counters.empty() ? Json(nullptr) : counters;
    j["counters_missing"] = text_or_null(p.counters_missing);
    j["samples"] = p.samples;
    j["hot"] = std::move(hot);
    j["sampler_missing"] = text_or_null(p.sampler_missing);
  } else {
    j["gpu"] = p.gpu;
    j["error"] = text_or_null(p.error);
    j["kernels"] = Json::array();
    for (const KernelReading& k : p.kernels) j["kernels"].push_back(to_json(k));
    j["kernels_missing"] = text_or_null(p.kernels_missing);
    j["clocks"] = to_json(p.clocks);
  }
  j["gflops"] = p.gflops;
  j["peak_gflops"] = if_known(p.peak_gflops);
  j["gbytes"] = p.gbytes;
  j["peak_gbytes"] = if_known(p.peak_gbytes);
  j["floor_ms"] = if_known(p.floor_ms);
  j["limit"] = p.limit;
  j["reading"] = p.reading();
  return j;
}

void print_profile(const Profile& p) {
  print("\nprofile: {}\n  roofline: {} limits\n", p.reading(),
        p.limit == "neither" ? "neither compute nor memory bandwidth" : p.limit);
  for (const HotFunction& h : p.hot) print("  {:5.1f} %  {}\n", 100 * h.share, h.name);
  for (const KernelReading& k : p.kernels)
    print("  {:9.1f} us  {} grid {} block {}: {}\n", k.us, k.name, k.grid, k.block, k.text());
  if (p.device != "cpu") print("  clocks: {}\n", p.clocks.text());
}

}  // namespace fla::tools
