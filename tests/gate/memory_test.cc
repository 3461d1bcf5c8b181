// Memory as callers have it: a workspace of exactly the size asked for at any address, and tensors and workspaces that
// end where the process's memory ends, so that reading past one is a crash.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <deque>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

std::vector<Case> cases(const FunctionSpec& spec) {
  // Ragged sizes, and one that leaves no padding at the end of a tile.
  std::vector<Case> list = {make_case(spec.name, sizes(1, 21, 2, 5, 9)), make_case(spec.name, sizes(1, 64, 1, 64, 64))};
  if (takes(spec, "cu_seqlens")) list.push_back(make_case(spec.name, packed({0, 1, 1, 18, 35}, 1, 12, 17)));
  for (Case& c : list)
    if (c.takes("initial_state")) c = c.with("initial_state");
  return list;
}

std::vector<std::string> with_reference(const Registry::Entry& e) {
  std::vector<std::string> names = backends(e);
  names.emplace_back(kReference);
  return names;
}

void Misaligned(const Registry::Entry& e) {
  for (const auto& backend : with_reference(e))
    for (const Case& c : cases(e.spec))
      for (const bool backward : passes(e.spec)) {
        const auto run = [&](const RunOptions& o) {
          return backward ? c.run_backward(context(backend), o) : c.run(context(backend), o);
        };
        const Outcome aligned = run({});
        for (const std::size_t offset : {1, 2, 3, 4, 8, 12, 16, 31, 32, 33, 48, 60, 63})
          expect_same_bits(aligned, run({.workspace_offset = offset}),
                           backend + ": " + c.text() + " with its workspace " + std::to_string(offset) + " bytes off");
      }
}

// Bytes that end exactly where a page begins that nobody may touch.
class Edge {
 public:
  explicit Edge(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t used = (bytes + page - 1) / page * page;
    total_ = used + page;
    void* p = mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(static_cast<std::byte*>(p) + used, page, PROT_NONE) != 0) {
      ADD_FAILURE() << "no memory with a guard page";
      std::abort();
    }
    base_ = static_cast<std::byte*>(p);
    data_ = base_ + used - bytes;
    std::memset(base_, 0xff, used);
  }
  ~Edge() { munmap(base_, total_); }
  Edge(const Edge&) = delete;
  Edge& operator=(const Edge&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte *base_ = nullptr, *data_ = nullptr;
  std::size_t total_ = 0;
};

std::size_t bytes_of(const TensorView& t) { return static_cast<std::size_t>(t.numel()) * size_of(t.dtype); }

void EdgeOfMemory(const Registry::Entry& e) {
  for (const auto& backend : with_reference(e))
    for (const DType dtype : {DType::F32, DType::BF16})
      for (const bool backward : passes(e.spec)) {
        const Case small = make_case(e.spec.name, sizes(2, 70, 2, 20, 33), {.dtype = dtype});
        const Case c = (small.takes("initial_state") ? small.with("initial_state") : small).prepared();
        const std::string what = backend + ": " + c.text() + (backward ? " backward" : "");
        const Context& ctx = context(backend);
        const Outcome expected = backward ? c.run_backward(ctx) : c.run(ctx);
        if (!expected.ok()) return expect_ok(expected, what);
        if (expected.no_such_pass) continue;
        Result<DynamicCall> call = backward ? c.backward_call() : c.call();
        ASSERT_TRUE(call.ok()) << call.status().message();
        for (const auto& f : call->spec().flags) {
          if (f.set) continue;
          ASSERT_TRUE(call->set_flag(f.name, true).ok()) << f.name;
        }
        std::deque<Edge> memory;
        const auto at_edge = [&](const TensorView& t) {
          TensorView moved(memory.emplace_back(bytes_of(t)).data(), t.dtype, t.dims());
          return moved;
        };
        for (const auto& a : call->spec().args) {
          if (a.role != Role::Input && a.role != Role::Upstream) continue;
          for (TensorView& t : a.get.views(call->args())) {
            if (!t) continue;
            ASSERT_TRUE(t.contiguous()) << a.name;
            const TensorView moved = at_edge(t);
            std::memcpy(moved.data, t.data, bytes_of(t));
            t = moved;
          }
        }
        const auto outputs = call->outputs(ctx);
        ASSERT_TRUE(outputs.ok()) << outputs.status().message();
        std::vector<std::pair<std::string, TensorView>> got;
        for (const auto& o : *outputs) {
          got.emplace_back(o.name, at_edge(TensorView(nullptr, o.dtype, o.shape)));
          if (o.contents) std::memcpy(got.back().second.data, o.contents.data, bytes_of(o.contents));
          ASSERT_TRUE(call->bind(o.name, got.back().second).ok());
        }
        const auto need = call->workspace_bytes(ctx);
        ASSERT_TRUE(need.ok()) << need.status().message();
        const Edge workspace(*need);
        const Status s = call->run(ctx, {workspace.data(), *need});
        ASSERT_TRUE(s.ok()) << s.message();
        for (const auto& [name, t] : got)
          EXPECT_TRUE(expected.has(name) && tools::same_bits(expected[name], t)) << what << ": " << name;
      }
}

// Nothing that a call keeps beside its arguments is tokens x tokens, not by blocks either.
void LinearWorkspace(const Registry::Entry& e) {
  for (const auto& backend : backends(e))
    for (const bool backward : passes(e.spec)) {
      const auto need = [&](std::int64_t T) {
        const Case c = make_case(e.spec.name, sizes(1, T, 1, 16, 16)).prepared();
        Result<DynamicCall> call = backward ? c.backward_call() : c.call();
        EXPECT_TRUE(call.ok()) << call.status().message();
        const auto outputs = call->outputs(context(backend));
        EXPECT_TRUE(outputs.ok()) << outputs.status().message();
        std::deque<Buffer> memory;
        for (const auto& o : *outputs)
          EXPECT_TRUE(call->bind(o.name, memory.emplace_back(o.dtype, o.shape).view()).ok());
        const auto bytes = call->workspace_bytes(context(backend));
        EXPECT_TRUE(bytes.ok()) << bytes.status().message();
        return *bytes;
      };
      std::size_t before = need(1000);
      for (const std::int64_t T : {2000, 4000, 8000}) {
        const std::size_t now = need(T);
        EXPECT_LE(now, 2 * before + 4096) << backend << ": " << e.spec.name << (backward ? " backward" : "") << " at "
                                          << T << " tokens, after " << before << " bytes at half of them";
        before = now;
      }
    }
}

const bool registered = for_every_function("MisalignedWorkspace", Misaligned) &&
                        for_every_function("EdgeOfMemory", EdgeOfMemory) &&
                        for_every_function("LinearWorkspace", LinearWorkspace);

}  // namespace
}  // namespace fla::gate
