// Addresses beyond 2^31 elements, through strides over reserved address space: no more memory is used than the elements
// themselves need.
#include <sys/mman.h>

#include <algorithm>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

// One element more than 32 bits can index, and odd, so that a wrapped offset hits no other element of the tensor.
constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 12345;

// A tensor whose elements along one axis are kFar apart.
class Sparse {
 public:
  Sparse(DType t, const std::vector<std::int64_t>& shape, int axis, bool backwards) {
    view_ = TensorView(nullptr, t, shape);
    std::int64_t s = 1;
    for (int i = view_.ndim - 1; i >= 0; --i) {
      if (i == axis) continue;
      view_.stride[static_cast<std::size_t>(i)] = s;
      s *= shape[static_cast<std::size_t>(i)];
    }
    view_.stride[static_cast<std::size_t>(axis)] = kFar;
    const std::int64_t reach = (shape[static_cast<std::size_t>(axis)] - 1) * kFar;
    bytes_ = static_cast<std::size_t>(reach + s) * size_of(t);
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) return;
    view_.data = memory_;
    if (backwards) {
      view_.data = static_cast<std::byte*>(memory_) + reach * static_cast<std::int64_t>(size_of(t));
      view_.stride[static_cast<std::size_t>(axis)] = -kFar;
    }
  }
  ~Sparse() {
    if (memory_ != MAP_FAILED) munmap(memory_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  bool ok() const { return memory_ != MAP_FAILED; }
  const TensorView& view() const { return view_; }

 private:
  void* memory_ = MAP_FAILED;
  std::size_t bytes_ = 0;
  TensorView view_;
};

void FarStrides(const Registry::Entry& e) {
  Case c = make_case(e.spec.name, sizes(2, 3, 2, 4, 5));
  if (c.takes("initial_state")) c = c.with("initial_state");
  c = c.prepared();
  std::vector<std::string> who = backends(e);
  who.emplace_back(kReference);
  for (const auto& backend : who) {
    const Context& ctx = context(backend);
    for (const bool backward : passes(e.spec)) {
      const auto run = [&](const Case& x) { return backward ? x.run_backward(ctx) : x.run(ctx); };
      const Outcome near = run(c);
      expect_ok(near, c.text());
      if (refused(near)) continue;
      if (!near.ok()) return;
      // Inputs, one at a time and along each axis.
      for (const auto& name : c.input_names()) {
        const TensorView& t = c.input(name);
        for (int axis = 0; axis < t.ndim; ++axis) {
          if (t.dim(axis) < 2) continue;
          const auto sparse = std::make_shared<Sparse>(
              t.dtype, std::vector<std::int64_t>(t.dims().begin(), t.dims().end()), axis, axis % 2 == 1);
          ASSERT_TRUE(sparse->ok()) << "no address space for " << name;
          tools::assign(sparse->view(), tools::values(t));
          expect_same_bits(
              near, run(c.with_view(name, sparse->view(), sparse)),
              backend + ": " + c.text() + ", " + name + " with far strides on axis " + std::to_string(axis));
        }
      }
      // Outputs and gradients.
      for (const auto& [name, b] : near.tensors)
        for (int axis = 0; axis < b.view().ndim; ++axis) {
          if (b.view().dim(axis) < 2) continue;
          const Sparse sparse(b.dtype(), b.shape(), axis, axis % 2 == 0);
          ASSERT_TRUE(sparse.ok()) << "no address space for " << name;
          Result<DynamicCall> call = backward ? c.backward_call() : c.call();
          ASSERT_TRUE(call.ok());
          const auto outputs = call->outputs(ctx);
          ASSERT_TRUE(outputs.ok());
          std::vector<Buffer> pools;  // unbound ones would be written into the case's own memory
          for (const auto& o : *outputs) {
            if (!o.contents || o.name == name) continue;
            pools.push_back(tools::clone(o.contents));
            ASSERT_TRUE(call->bind(o.name, pools.back().view()).ok());
          }
          ASSERT_TRUE(call->bind(name, sparse.view()).ok());
          const Status s = call->run(ctx);
          if (refused(s)) continue;
          ASSERT_TRUE(s.ok()) << s.message();
          EXPECT_TRUE(tools::same_bits(b.view(), sparse.view()))
              << backend << ": " << c.text() << ", " << name << " with far strides on axis " << axis;
        }
    }
  }
}

const bool registered = for_every_backend("FarStrides", FarStrides);

}  // namespace
}  // namespace fla::gate
