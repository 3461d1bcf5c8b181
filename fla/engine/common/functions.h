// A family's functions, listed once: the registrations of its reference, its cpu and its cuda kernels all read the list.
//
//   inline constexpr std::tuple kGlaFunctions{chunk_form(kChunkGla, kChunkGlaBackward),
//                                             step_form(kFusedRecurrentGla, kFusedRecurrentGlaBackward),
//                                             step_form(kGlaStep)};
#pragma once

#include <cstdint>
#include <tuple>

#include "fla/registry/call.h"

namespace fla {

// Chunkwise, for training and prefill; token by token, for decoding and short sequences.
enum class Form : std::uint8_t { Chunk, Step };

template <typename F, typename G = void>
struct FunctionOf {
  Form form;
  FunctionId<F> forward;
  FunctionId<G> backward;
};
template <typename F>
struct FunctionOf<F, void> {
  Form form;
  FunctionId<F> forward;
};

template <typename F, typename G>
constexpr FunctionOf<F, G> chunk_form(FunctionId<F> forward, FunctionId<G> backward) {
  return {Form::Chunk, forward, backward};
}
template <typename F, typename G>
constexpr FunctionOf<F, G> step_form(FunctionId<F> forward, FunctionId<G> backward) {
  return {Form::Step, forward, backward};
}
template <typename F>
constexpr FunctionOf<F> step_form(FunctionId<F> forward) {
  return {Form::Step, forward};
}

// fn(form, id, is_backward) for every function and backward of the list.
template <typename Fn, typename... Of>
void for_each_function(const std::tuple<Of...>& functions, Fn&& fn) {
  const auto one = [&](const auto& f) {
    fn(f.form, f.forward, std::false_type());
    if constexpr (requires { f.backward; }) fn(f.form, f.backward, std::true_type());
  };
  std::apply([&](const auto&... f) { (one(f), ...); }, functions);
}

}  // namespace fla
