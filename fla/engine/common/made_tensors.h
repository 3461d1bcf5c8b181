// Tensors that a call makes for an engine, laid into its workspace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "fla/core/tensor.h"

namespace fla {

// Lays tensors of one element type one after the other, from multiples of 64 bytes. Without memory it measures.
class MadeTensors {
 public:
  MadeTensors(DType element, std::byte* base) : element_(element), base_(base) {
    used_ = (kAlign - reinterpret_cast<std::uintptr_t>(base) % kAlign) % kAlign;
  }
  TensorView make(std::initializer_list<std::int64_t> dims) {
    const TensorView t(base_ == nullptr ? nullptr : base_ + used_, element_, std::span(dims.begin(), dims.size()));
    used_ += (static_cast<std::size_t>(t.numel()) * size_of(element_) + kAlign - 1) / kAlign * kAlign;
    return t;
  }
  // What the tensors take of this memory, padding included.
  std::size_t used() const { return used_; }
  // What they take of memory at any address, where they were measured.
  std::size_t anywhere() const { return used_ + kAlign; }

 private:
  static constexpr std::size_t kAlign = 64;
  DType element_;
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace fla
