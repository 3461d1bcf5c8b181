#include "fla/kernels/cuda/emulated/emulator.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define FLA_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FLA_ASAN 1
#endif
#endif
#if defined(FLA_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#error "the emulator switches stacks with x86-64 instructions"
#endif

// Saves the callee-saved registers on this stack, leaves its top in *from and continues on the stack `to`.
extern "C" void fla_emulator_switch(void** from, void* to);
asm(R"(
.text
.hidden fla_emulator_switch
.globl fla_emulator_switch
.type fla_emulator_switch, @function
fla_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fla_emulator_switch, .-fla_emulator_switch
)");

namespace fla::cuda::emulator {
namespace {

constexpr int kWarp = 32;
constexpr std::size_t kGuard = 256;  // bytes on both sides of shared memory
constexpr unsigned char kGuardByte = 0xa5;
constexpr unsigned char kPoisonByte = 0xff;  // NaN as F32, F16 and BF16
#if defined(FLA_ASAN)
constexpr std::size_t kStackBytes = std::size_t{512} << 10;
#else
constexpr std::size_t kStackBytes = std::size_t{128} << 10;
#endif

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::byte* map_pages(std::size_t bytes, int protection) {
  void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("emulator: mmap");
    std::abort();
  }
  return static_cast<std::byte*>(p);
}

// A stack with an unmapped page below it.
class Stack {
 public:
  Stack() : map_(map_pages(page_bytes() + kStackBytes, PROT_READ | PROT_WRITE)) {
    mprotect(map_, page_bytes(), PROT_NONE);
  }
  ~Stack() {
    if (map_ != nullptr) munmap(map_, page_bytes() + kStackBytes);
  }
  Stack(Stack&& o) noexcept : map_(std::exchange(o.map_, nullptr)) {}
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  std::byte* bottom() const { return map_ + page_bytes(); }
  std::byte* top() const { return bottom() + kStackBytes; }
  bool guards(const void* p) const { return p >= map_ && p < bottom(); }

 private:
  std::byte* map_;
};

using Clocks = std::vector<std::uint32_t>;  // by thread: the accesses up to this clock are ordered before

struct Copy {
  void* dst;
  const void* src;
  int bytes, valid;
};

// What a fiber waits in: "sync_threads" at a line of a file, "barrier" with a number.
struct Place {
  const char* what = "";
  const char* file = "";
  int number = 0;
  std::string text() const {
    std::string s = what;
    if (*file != '\0') s += std::string(" (") + file + ":" + std::to_string(number) + ")";
    if (*file == '\0' && number > 0) s += " " + std::to_string(number);
    return s;
  }
};

struct Fiber {
  void* sp = nullptr;
  void* fake_stack = nullptr;
  bool done = false;
  bool waited = false;  // for the launch before
  Place place;          // of the last wait
  std::uint32_t clock = 1;
  std::shared_ptr<const Clocks> seen;
  std::vector<Copy> open;                // cp.async since the last commit
  std::deque<std::vector<Copy>> groups;  // committed, oldest first
};

// Orders what its participants did before it before what they do after it.
class Join {
 public:
  void add(int thread, const Fiber& f, std::size_t threads) {
    if (!clocks_) clocks_ = std::make_shared<Clocks>(threads, 0);
    if (f.seen != last_) {
      for (std::size_t i = 0; i < threads; ++i) (*clocks_)[i] = std::max((*clocks_)[i], (*f.seen)[i]);
      last_ = f.seen;
    }
    auto& own = (*clocks_)[static_cast<std::size_t>(thread)];
    own = std::max(own, f.clock);
  }
  std::shared_ptr<const Clocks> take() {
    last_.reset();
    return std::exchange(clocks_, nullptr);
  }

 private:
  std::shared_ptr<Clocks> clocks_;
  std::shared_ptr<const Clocks> last_;
};

struct Barrier {
  int count = 0;  // named barriers: what the first to come said
  int arrived = 0;
  std::vector<int> waiting;
  Join join;
  const char* file = nullptr;  // of sync_threads
  int line = 0;
};

struct Rendezvous {
  const char* what = nullptr;
  int arrived = 0;
  void* data[kWarp] = {};
};

// What is known of two bytes of shared memory.
struct Cell {
  static constexpr int kReaders = 4;  // by warp, so that readers of different warps are all remembered
  std::int16_t writer = -1;           // -1: nobody
  std::int16_t copier = -1;           // whose cp.async is under way
  std::uint32_t written = 0;          // the writer's clock
  std::int16_t reader[kReaders] = {-1, -1, -1, -1};
  std::uint32_t read[kReaders] = {};
};

class Machine {
 public:
  explicit Machine(const Launch& l, void (*body)(void*), void* arg) : launch_(l), body_(body), arg_(arg) {
    self_.threads = l.threads;
    self_.grid = l.grid;
    shared_.resize(2 * kGuard + l.shared_bytes + 1024);
    const auto address = reinterpret_cast<std::uintptr_t>(shared_.data()) + kGuard;
    base_ = shared_.data() + kGuard + ((1024 - address % 1024) % 1024);
  }

  Status run_block(Dim3 block);

  Launch launch_;
  void (*body_)(void*);
  void* arg_;
  Self self_;
  std::string error_;
  std::vector<Fiber> fibers_;
  std::vector<std::byte> shared_;
  std::byte* base_;
  std::vector<Cell> cells_;
  Barrier barriers_[16];
  std::vector<Rendezvous> rendezvous_;
  std::vector<int> ready_;
  std::size_t next_ready_ = 0;
  int alive_ = 0;
  std::mt19937_64 random_;

  Fiber& me() { return fibers_[static_cast<std::size_t>(self_.thread)]; }
  int pick();
  void wake(int thread) { ready_.push_back(thread); }
  void wait(const Place& place) {
    me().place = place;
    leave(false);
  }
  void leave(bool done);
  [[noreturn]] void abandon();
  void release(Barrier& b);
  std::string where(int thread) const {
    return "thread " + std::to_string(thread) + " (warp " + std::to_string(thread / kWarp) + ", lane " +
           std::to_string(thread % kWarp) + ")";
  }
  bool ordered(int thread, std::uint32_t clock) {
    return thread == self_.thread || (*me().seen)[static_cast<std::size_t>(thread)] >= clock;
  }
  std::string conflict(const char* verb, const Cell& c, const char* what, int other, const char* end) const {
    std::string s =
        std::string(verb) + " shared memory at byte " + std::to_string(2 * (&c - cells_.data())) + ", " + what;
    return other < 0 ? s : s + " " + where(other) + " " + end;
  }
  Cell* cells_of(const void* p, std::size_t bytes, std::size_t& count, const char* what);
  void start_block(Dim3 block);
  std::string deadlock() const;

  void* main_sp_ = nullptr;
  void* main_fake_stack_ = nullptr;
  const void* main_bottom_ = nullptr;
  std::size_t main_size_ = 0;
};

thread_local Machine* machine = nullptr;

std::vector<Stack>& stacks() {
  thread_local std::vector<Stack> all;
  return all;
}

std::vector<const DeviceBuffer*>& buffers() {
  thread_local std::vector<const DeviceBuffer*> all;
  return all;
}

void finish_switch([[maybe_unused]] void* fake_stack, [[maybe_unused]] bool from_main) {
#if defined(FLA_ASAN)
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(fake_stack, &bottom, &size);
  if (from_main) {
    machine->main_bottom_ = bottom;
    machine->main_size_ = size;
  }
#endif
}

void start_switch([[maybe_unused]] void** fake_stack, [[maybe_unused]] int to) {
#if defined(FLA_ASAN)
  if (to < 0) {
    __sanitizer_start_switch_fiber(fake_stack, machine->main_bottom_, machine->main_size_);
  } else {
    __sanitizer_start_switch_fiber(fake_stack, stacks()[static_cast<std::size_t>(to)].bottom(), kStackBytes);
  }
#endif
}

thread_local bool entered_from_main = false;

void fiber_main() {
  finish_switch(nullptr, std::exchange(entered_from_main, false));
  machine->body_(machine->arg_);
  if (machine->launch_.overlapped && !machine->me().waited) fail("ends an overlapped launch without wait_for_previous");
  machine->leave(true);
}

int Machine::pick() {
  if (next_ready_ == ready_.size()) {
    ready_.clear();
    next_ready_ = 0;
    return -1;
  }
  if (next_ready_ >= 4096) {  // most entries have been taken
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(next_ready_));
    next_ready_ = 0;
  }
  if (options().shuffle)
    std::swap(ready_[next_ready_], ready_[next_ready_ + random_() % (ready_.size() - next_ready_)]);
  return ready_[next_ready_++];
}

// Continues with another fiber, or with run_block when none can run; returns when this one is woken.
void Machine::leave(bool done) {
  Fiber& from = me();
  const int own = self_.thread;
  if (done) {
    from.done = true;
    --alive_;
    Barrier& b = barriers_[0];
    if (alive_ > 0 && b.arrived == alive_) release(b);
  }
  const int to = pick();
  if (to == own) return;
  start_switch(done ? nullptr : &from.fake_stack, to);
  if (to >= 0) self_.thread = to;
  fla_emulator_switch(&from.sp, to < 0 ? main_sp_ : fibers_[static_cast<std::size_t>(to)].sp);
  finish_switch(from.fake_stack, std::exchange(entered_from_main, false));
}

void Machine::abandon() {
  start_switch(nullptr, -1);  // gives up what the sanitizer keeps of this stack's variables: none is used below
  fla_emulator_switch(&me().sp, main_sp_);
  std::abort();
}

void Machine::release(Barrier& b) {
  const auto seen = b.join.take();
  for (const int t : b.waiting) {
    Fiber& f = fibers_[static_cast<std::size_t>(t)];
    f.seen = seen;
    ++f.clock;
    wake(t);
  }
  b.waiting.clear();
  b.file = nullptr;
  b.arrived = b.count = 0;
  ++counters().barriers;
}

void Machine::start_block(Dim3 block) {
  self_.block = block;
  const auto n = static_cast<std::size_t>(launch_.threads);
  while (stacks().size() < n) stacks().emplace_back();
  fibers_.assign(n, {});
  const auto nothing = std::make_shared<const Clocks>(n, 0);
  for (std::size_t i = 0; i < n; ++i) {
    std::byte* const top = stacks()[i].top();
#if defined(FLA_ASAN)
    __asan_unpoison_memory_region(stacks()[i].bottom(), kStackBytes);
#endif
    // What fla_emulator_switch pops: six registers, then its return address; a function is entered with the stack 8
    // bytes off a multiple of 16.
    auto** sp = reinterpret_cast<void**>(top - 16);
    *--sp = nullptr;
    *--sp = reinterpret_cast<void*>(&fiber_main);
    for (int r = 0; r < 6; ++r) *--sp = nullptr;
    fibers_[i].sp = sp;
    fibers_[i].seen = nothing;
  }
  for (Barrier& b : barriers_) b = {};
  rendezvous_.assign(n / kWarp, {});
  ready_.resize(n);
  std::iota(ready_.begin(), ready_.end(), 0);
  next_ready_ = 0;
  alive_ = launch_.threads;
  std::memset(base_ - kGuard, kGuardByte, kGuard);
  std::memset(base_, kPoisonByte, launch_.shared_bytes);
  std::memset(base_ + launch_.shared_bytes, kGuardByte, kGuard);
  cells_.assign((launch_.shared_bytes + 1) / 2, {});
}

std::string Machine::deadlock() const {
  std::map<std::string, std::pair<int, int>> groups;  // count, first thread
  int done = 0;
  for (std::size_t i = 0; i < fibers_.size(); ++i) {
    if (fibers_[i].done) {
      ++done;
      continue;
    }
    auto [it, added] = groups.try_emplace(fibers_[i].place.text(), 0, static_cast<int>(i));
    ++it->second.first;
  }
  std::string text = "deadlock:";
  for (const auto& [what, group] : groups) {
    text += " " + std::to_string(group.first) + " threads (first " + std::to_string(group.second) + ") wait in " +
            what + ";";
  }
  return text + " " + std::to_string(done) + " have returned";
}

Status Machine::run_block(Dim3 block) {
  start_block(block);
  const int first = pick();
  self_.thread = first;
  entered_from_main = true;
  start_switch(&main_fake_stack_, first);
  fla_emulator_switch(&main_sp_, fibers_[static_cast<std::size_t>(first)].sp);
  finish_switch(main_fake_stack_, false);
  ++counters().blocks;
  if (error_.empty() && alive_ > 0) error_ = deadlock();
  if (error_.empty()) {
    const auto spoilt = [](const std::byte* p) {
      return std::any_of(p, p + kGuard, [](std::byte b) { return b != std::byte{kGuardByte}; });
    };
    if (spoilt(base_ - kGuard) || spoilt(base_ + launch_.shared_bytes)) error_ = "writes beside shared memory";
  }
  if (error_.empty()) return {};
  return {Code::DeviceError, std::string(launch_.name) + ": block (" + std::to_string(block.x) + "," +
                                 std::to_string(block.y) + "," + std::to_string(block.z) + "): " + error_};
}

Cell* Machine::cells_of(const void* p, std::size_t bytes, std::size_t& count, const char* what) {
  const auto offset = static_cast<const std::byte*>(p) - base_;
  if (offset < 0 || static_cast<std::size_t>(offset) + bytes > launch_.shared_bytes) {
    fail(std::string(what) + " shared memory at byte " + std::to_string(offset) + " of " +
         std::to_string(launch_.shared_bytes));
  }
  const auto first = static_cast<std::size_t>(offset) / 2;
  count = (static_cast<std::size_t>(offset) + bytes + 1) / 2 - first;
  return &cells_[first];
}

// A memory fault of a fiber becomes an error of the launch: the handler lets the fiber continue here.
const void* fault_address = nullptr;
void after_fault() {
  for (std::size_t i = 0; i < stacks().size(); ++i) {
    if (stacks()[i].guards(fault_address)) fail("stack overflow of the emulated thread");
  }
  std::string text = "global memory access out of bounds";
  std::ptrdiff_t nearest = 65536;
  for (const DeviceBuffer* b : buffers()) {
    const auto offset = static_cast<const std::byte*>(fault_address) - static_cast<const std::byte*>(b->data());
    const auto size = static_cast<std::ptrdiff_t>(b->size());
    const std::ptrdiff_t distance = offset < 0 ? -offset : offset - size;
    if (distance >= nearest) continue;
    nearest = distance;
    text = "global memory access out of bounds: byte " + std::to_string(offset) + " of a buffer of " +
           std::to_string(size);
  }
  fail(std::move(text));
}

void on_fault(int number, siginfo_t* info, void* context) {
  if (machine == nullptr) {
    signal(number, SIG_DFL);  // not ours: the access is repeated and ends the program
    return;
  }
  fault_address = info->si_addr;
  auto* c = static_cast<ucontext_t*>(context);
  auto sp = static_cast<std::uint64_t>(c->uc_mcontext.gregs[REG_RSP]);
  const Stack& s = stacks()[static_cast<std::size_t>(machine->self_.thread)];
  if (s.guards(info->si_addr))
    sp = reinterpret_cast<std::uint64_t>(s.top());  // nothing of this stack is needed any more
  c->uc_mcontext.gregs[REG_RSP] = static_cast<greg_t>(((sp - 256) & ~std::uint64_t{15}) - 8);
  c->uc_mcontext.gregs[REG_RIP] = static_cast<greg_t>(reinterpret_cast<std::uint64_t>(&after_fault));
}

// Catches memory faults while a launch runs.
class FaultHandler {
 public:
  FaultHandler() : memory_(std::size_t{64} << 10) {
    stack_t s{};
    s.ss_sp = memory_.data();
    s.ss_size = memory_.size();
    sigaltstack(&s, &old_stack_);
    struct sigaction a {};
    a.sa_sigaction = on_fault;
    a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&a.sa_mask);
    sigaction(SIGSEGV, &a, &old_);
  }
  ~FaultHandler() {
    sigaction(SIGSEGV, &old_, nullptr);
    sigaltstack(&old_stack_, nullptr);
  }
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;

 private:
  std::vector<std::byte> memory_;
  stack_t old_stack_{};
  struct sigaction old_ {};
};

}  // namespace

OpenDeviceMemory::OpenDeviceMemory() {
  for (const DeviceBuffer* b : buffers()) b->protect(true);
}
OpenDeviceMemory::~OpenDeviceMemory() {
  for (const DeviceBuffer* b : buffers()) b->protect(false);
}

Options& options() {
  thread_local Options o;
  return o;
}

Counters& counters() {
  thread_local Counters c;
  return c;
}

Tail& tail() {
  thread_local Tail t;
  return t;
}

DeviceBuffer::DeviceBuffer(std::size_t bytes, bool sparse) : bytes_(bytes) {
  // The end lies against an unmapped page, as near as 16-byte alignment of the start lets it.
  const std::size_t padded = (std::max<std::size_t>(bytes, 1) + 15) / 16 * 16;
  const std::size_t pages = (padded + page_bytes() - 1) / page_bytes() * page_bytes();
  map_bytes_ = pages + 2 * page_bytes();
  map_ = map_pages(map_bytes_, PROT_NONE);
  data_ = map_ + page_bytes() + pages - padded;
  if (!sparse) {
    protect(true);
    std::memset(map_ + page_bytes(), kPoisonByte, pages);
  }
  protect(false);
  buffers().push_back(this);
}

DeviceBuffer::~DeviceBuffer() {
  std::erase(buffers(), this);
  munmap(map_, map_bytes_);
}

void DeviceBuffer::protect(bool open) const {
  static const bool shared = std::getenv("FLA_CPP_EMULATOR_SHARED") != nullptr;
  open |= shared;
  mprotect(map_ + page_bytes(), map_bytes_ - 2 * page_bytes(), open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void DeviceBuffer::upload(const void* from) {
  protect(true);
  if (bytes_ > 0) std::memcpy(data_, from, bytes_);
  protect(false);
}

void DeviceBuffer::download(void* to) const {
  protect(true);
  if (bytes_ > 0) std::memcpy(to, data_, bytes_);
  protect(false);
}

Status run(const Launch& l, void (*body)(void*), void* arg) {
  const auto bad = [&l](const std::string& what) {
    return Status(Code::DeviceError, std::string(l.name) + ": " + what);
  };
  if (machine != nullptr) return bad("launched from inside a kernel");
  if (l.threads <= 0 || l.threads > 1024 || l.threads % kWarp != 0) {
    return bad("threads: expected a multiple of 32 up to 1024, got " + std::to_string(l.threads));
  }
  if (l.shared_bytes > options().device.shared_per_block) {
    return bad("shared memory: expected at most " + std::to_string(options().device.shared_per_block) + " bytes, got " +
               std::to_string(l.shared_bytes));
  }
  Machine m(l, body, arg);
  m.random_.seed(options().seed);
  const std::int64_t all = l.grid.x * l.grid.y * l.grid.z;
  Tail& cut = tail();
  if (cut.mode == Tail::Mode::Note) cut.blocks.push_back(all);
  std::int64_t blocks = all, parts = 1;
  if (cut.mode == Tail::Mode::Cut) {
    if (cut.next == cut.blocks.size()) return bad("a launch that was not noted");
    blocks = cut.blocks[cut.next++];
    parts = cut.parts == nullptr ? 1 : cut.parts(l.name);
    if (blocks > all || blocks % parts != 0 || all % parts != 0) {
      return bad("grid: expected " + std::to_string(parts) + " parts of at least " + std::to_string(blocks) +
                 " blocks together, got " + std::to_string(all));
    }
  }
  // The i-th block of those that run.
  const auto number = [&](std::int64_t i) {
    const std::int64_t each = blocks / parts, of_part = all / parts;
    return i / each * of_part + (of_part - each) + i % each;
  };
  std::vector<std::int64_t> order;
  if (options().shuffle) {
    order.resize(static_cast<std::size_t>(blocks));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), m.random_);
  }
  const OpenDeviceMemory open;
  const FaultHandler handler;
  machine = &m;
  Status status;
  for (std::int64_t i = 0; i < blocks && status.ok(); ++i) {
    const std::int64_t b = number(order.empty() ? i : order[static_cast<std::size_t>(i)]);
    status = m.run_block({b % l.grid.x, b / l.grid.x % l.grid.y, b / (l.grid.x * l.grid.y)});
  }
  machine = nullptr;
  ++counters().launches;
  return status;
}

const Self& self() { return machine->self_; }

void fail(std::string message) {
  message.insert(0, machine->where(machine->self_.thread) + ": ");
  machine->error_ = std::move(message);
  machine->abandon();
}

void wait_for_previous() { machine->me().waited = true; }

std::byte* shared_memory() { return machine->base_; }
std::size_t shared_bytes() { return machine->launch_.shared_bytes; }

void check_aligned(const void* p, std::size_t bytes, const char* what) {
  if (reinterpret_cast<std::uintptr_t>(p) % bytes != 0) {
    fail(std::string(what) + ": the address is no multiple of " + std::to_string(bytes));
  }
}

void note_read(const void* p, std::size_t bytes) {
  Machine& m = *machine;
  std::size_t count = 0;
  Cell* cells = m.cells_of(p, bytes, count, "reads");
  const int slot = m.self_.thread / kWarp % Cell::kReaders;
  for (std::size_t i = 0; i < count; ++i) {
    Cell& c = cells[i];
    if (c.copier >= 0) fail(m.conflict("reads", c, "where a cp.async of", c.copier, "is not waited for"));
    if (c.writer < 0) {
      if (options().unwritten) fail(m.conflict("reads", c, "which nobody wrote", -1, ""));
    } else if (options().races && !m.ordered(c.writer, c.written)) {
      fail(m.conflict("race: reads", c, "which", c.writer, "wrote with no barrier between"));
    }
    c.reader[slot] = static_cast<std::int16_t>(m.self_.thread);
    c.read[slot] = m.me().clock;
  }
}

void note_write(const void* p, std::size_t bytes) {
  Machine& m = *machine;
  std::size_t count = 0;
  Cell* cells = m.cells_of(p, bytes, count, "writes");
  for (std::size_t i = 0; i < count; ++i) {
    Cell& c = cells[i];
    if (c.copier >= 0) fail(m.conflict("writes", c, "where a cp.async of", c.copier, "is not waited for"));
    if (options().races) {
      if (c.writer >= 0 && !m.ordered(c.writer, c.written)) {
        fail(m.conflict("race: writes", c, "which", c.writer, "wrote with no barrier between"));
      }
      for (int r = 0; r < Cell::kReaders; ++r) {
        if (c.reader[r] >= 0 && !m.ordered(c.reader[r], c.read[r])) {
          fail(m.conflict("race: writes", c, "which", c.reader[r], "read with no barrier between"));
        }
      }
    }
    c.writer = static_cast<std::int16_t>(m.self_.thread);
    c.written = m.me().clock;
  }
}

void sync_threads(const char* file, int line) {
  Machine& m = *machine;
  Barrier& b = m.barriers_[0];
  if (b.file == nullptr) {
    b.file = file;
    b.line = line;
  } else if (b.line != line || std::strcmp(b.file, file) != 0) {
    fail(std::string("divergent sync_threads: ") + file + ":" + std::to_string(line) + ", another thread at " + b.file +
         ":" + std::to_string(b.line));
  }
  b.join.add(m.self_.thread, m.me(), m.fibers_.size());
  b.waiting.push_back(m.self_.thread);
  if (++b.arrived == m.alive_) m.release(b);
  m.wait({"sync_threads", file, line});
}

void barrier(int id, int count, bool wait) {
  Machine& m = *machine;
  const auto wrong = [id](std::string what) {
    what.insert(0, "barrier " + std::to_string(id) + ": ");
    fail(std::move(what));
  };
  if (id < 1 || id > 15) wrong("expected a number from 1 to 15");
  if (count <= 0 || count > m.launch_.threads || count % kWarp != 0) {
    wrong("the count is no multiple of 32 within the block: " + std::to_string(count));
  }
  Barrier& b = m.barriers_[id];
  if (b.arrived > 0 && b.count != count) {
    wrong("called for " + std::to_string(count) + " threads, by others for " + std::to_string(b.count));
  }
  b.count = count;
  b.join.add(m.self_.thread, m.me(), m.fibers_.size());
  ++b.arrived;
  if (wait) {
    b.waiting.push_back(m.self_.thread);
  } else {
    ++m.me().clock;  // what it does from here on is not ordered by this barrier
  }
  if (b.arrived == count) m.release(b);
  if (wait) m.wait({"barrier", "", id});
}

void warp_together(const char* what, void* data, void (*fn)(void* const* lanes)) {
  Machine& m = *machine;
  Rendezvous& r = m.rendezvous_[static_cast<std::size_t>(m.self_.thread / kWarp)];
  if (r.arrived > 0 && std::strcmp(r.what, what) != 0) {
    fail("divergent warp: calls " + std::string(what) + " while other lanes wait in " + r.what);
  }
  r.what = what;
  r.data[m.self_.thread % kWarp] = data;
  if (++r.arrived == kWarp) {
    fn(r.data);
    r.arrived = 0;
    const int first = m.self_.thread / kWarp * kWarp;
    for (int t = first; t < first + kWarp; ++t) m.wake(t);
  }
  m.wait({what});
}

void sync_warp() {
  warp_together("sync_warp", nullptr, [](void* const*) {
    Machine& m = *machine;
    const int first = m.self_.thread / kWarp * kWarp;
    Join join;
    for (int t = first; t < first + kWarp; ++t) join.add(t, m.fibers_[static_cast<std::size_t>(t)], m.fibers_.size());
    const auto seen = join.take();
    for (int t = first; t < first + kWarp; ++t) {
      Fiber& f = m.fibers_[static_cast<std::size_t>(t)];
      f.seen = seen;
      ++f.clock;
    }
  });
}

void cp_async(void* dst, const void* src, int bytes, int valid) {
  Machine& m = *machine;
  if (valid < 0 || valid > bytes) fail("cp_async: valid: expected 0 to the size, got " + std::to_string(valid));
  check_aligned(dst, static_cast<std::size_t>(bytes), "cp_async to shared memory");
  check_aligned(src, static_cast<std::size_t>(bytes), "cp_async from global memory");
  note_write(dst, static_cast<std::size_t>(bytes));
  std::size_t count = 0;
  Cell* cells = m.cells_of(dst, static_cast<std::size_t>(bytes), count, "writes");
  for (std::size_t i = 0; i < count; ++i) cells[i].copier = static_cast<std::int16_t>(m.self_.thread);
  std::memset(dst, kPoisonByte, static_cast<std::size_t>(bytes));
  m.me().open.push_back({dst, src, bytes, valid});
}

void cp_async_commit() {
  Fiber& f = machine->me();
  f.groups.push_back(std::exchange(f.open, {}));
}

void cp_async_wait(int left) {
  Machine& m = *machine;
  Fiber& f = m.me();
  while (f.groups.size() > static_cast<std::size_t>(left)) {
    for (const Copy& c : f.groups.front()) {
      std::memset(c.dst, 0, static_cast<std::size_t>(c.bytes));
      if (c.valid > 0) std::memcpy(c.dst, c.src, static_cast<std::size_t>(c.valid));
      std::size_t count = 0;
      Cell* cells = m.cells_of(c.dst, static_cast<std::size_t>(c.bytes), count, "writes");
      for (std::size_t i = 0; i < count; ++i) {
        cells[i].copier = -1;
        cells[i].writer = static_cast<std::int16_t>(m.self_.thread);
        cells[i].written = f.clock;
      }
    }
    f.groups.pop_front();
  }
}

}  // namespace fla::cuda::emulator

namespace fla::cuda {

Result<DeviceInfo> device_info(int index) {
  if (index != 0) return Status(Code::InvalidArgument, "device: got index " + std::to_string(index) + " of 1 devices");
  return emulator::options().device;
}

const DeviceInfo* device_limits(int index) { return index == 0 ? &emulator::options().device : nullptr; }

Status read_memory(void* to, const void* from, std::size_t bytes, Stream /*stream*/) {
  const emulator::OpenDeviceMemory open;
  if (bytes > 0) std::memcpy(to, from, bytes);
  return {};
}

OnDevice::OnDevice(int /*index*/) {}
OnDevice::~OnDevice() = default;

}  // namespace fla::cuda
