// Softmax-like attention on the CPU, for families whose arguments translate into one of its problems.
#pragma once

#include "fla/engine/attn/cpu/entry.h"
#include "fla/engine/attn/nsa.h"
#include "fla/engine/attn/path.h"
#include "fla/engine/attn/problem.h"
#include "fla/engine/attn/ref.h"
#include "fla/engine/attn/wall_cache.h"
#include "fla/engine/common/cpu_engine.h"

namespace fla {

namespace detail {

// The kernels of the tiles, by the policy that cpu::with_policy chooses.
inline std::size_t attn_policy(const AttnProblem& p) {
  if (p.r) return 4;
  if (p.gk) return p.g ? 3 : 2;
  return p.g ? 1 : 0;
}
inline constexpr const char* kAttnRows[] = {"attn.rows"};
inline constexpr const char* kAttnTilesForward[] = {"attn.tiles.plain.forward", "attn.tiles.gated.forward",
                                                    "attn.tiles.channel.forward", "attn.tiles.channel_gated.forward",
                                                    "attn.tiles.second.forward"};
inline constexpr const char* kAttnTilesBackward[] = {"attn.tiles.plain.backward", "attn.tiles.gated.backward",
                                                     "attn.tiles.channel.backward", "attn.tiles.channel_gated.backward",
                                                     "attn.tiles.second.backward"};
inline constexpr const char* kPathForward[] = {"attn.path.plain.forward", "attn.path.gated.forward"};
inline constexpr const char* kPathBackward[] = {"attn.path.plain.backward", "attn.path.gated.backward"};
inline constexpr const char* kNsaForward[] = {"attn.nsa.forward"};
inline constexpr const char* kNsaBackward[] = {"attn.nsa.backward"};
inline constexpr const char* kNsaChoose[] = {"attn.nsa.choose"};
inline constexpr const char* kWallDecode[] = {"attn.wall.decode"};
inline constexpr const char* kWallCache[] = {"attn.wall.cache"};

// A reference needs no workspace; where there is one kernel there is no choice.
template <typename P>
std::size_t no_workspace(const P&, int) {
  return 0;
}
template <typename P>
std::size_t only_kernel(const P&) {
  return 0;
}
inline std::size_t path_gate(const PathProblem& p) { return p.g ? 1 : 0; }

template <typename P, Status (*kRun)(const P&, ThreadPool&)>
Status run_rows(const P& p, ThreadPool& pool, std::span<std::byte>) {
  return kRun(p, pool);
}
template <typename P, Status (*kRun)(const P&, ThreadPool&)>
inline constexpr CpuPass<P> kRowsPass = {kAttnRows, only_kernel<P>, no_workspace<P>, run_rows<P, kRun>};

}  // namespace detail

inline constexpr CpuEngine<AttnProblem, AttnProblem> kAttnReference = {
    kReference,
    "attn.rows",
    detail::kRowsPass<AttnProblem, reference::attn_forward>,
    detail::kRowsPass<AttnProblem, reference::attn_backward>,
};
inline constexpr CpuEngine<AttnProblem, AttnProblem> kAttnTiles = {
    "cpu",
    "attn.tiles",
    {detail::kAttnTilesForward, detail::attn_policy, cpu::attn_forward_workspace, cpu::attn_forward},
    {detail::kAttnTilesBackward, detail::attn_policy, cpu::attn_backward_workspace, cpu::attn_backward},
};

inline constexpr CpuEngine<PathProblem, PathProblem> kPathReference = {
    kReference,
    "attn.rows",
    detail::kRowsPass<PathProblem, reference::path_forward>,
    detail::kRowsPass<PathProblem, reference::path_backward>,
};
inline constexpr CpuEngine<PathProblem, PathProblem> kPathBlocks = {
    "cpu",
    "attn.path",
    {detail::kPathForward, detail::path_gate, cpu::path_forward_workspace, cpu::path_forward},
    {detail::kPathBackward, detail::path_gate, cpu::path_backward_workspace, cpu::path_backward},
};

inline constexpr CpuEngine<NsaProblem, NsaProblem> kNsaReference = {
    kReference,
    "attn.rows",
    detail::kRowsPass<NsaProblem, reference::nsa_forward>,
    detail::kRowsPass<NsaProblem, reference::nsa_backward>,
};
inline constexpr CpuEngine<NsaProblem, NsaProblem> kNsaBranches = {
    "cpu",
    "attn.nsa",
    {detail::kNsaForward, detail::only_kernel<NsaProblem>, cpu::nsa_forward_workspace, cpu::nsa_forward},
    {detail::kNsaBackward, detail::only_kernel<NsaProblem>, cpu::nsa_backward_workspace, cpu::nsa_backward},
};

// Without a backward.
inline constexpr CpuEngine<NsaProblem, NsaProblem> kNsaChoiceReference = {
    kReference, "attn.rows", detail::kRowsPass<NsaProblem, reference::nsa_choose>, {}};
inline constexpr CpuEngine<NsaProblem, NsaProblem> kNsaChoice = {
    "cpu",
    "attn.nsa",
    {detail::kNsaChoose, detail::only_kernel<NsaProblem>, cpu::nsa_choose_workspace, cpu::nsa_choose},
    {}};
inline constexpr CpuEngine<WallDecodeProblem, WallDecodeProblem> kWallDecodeReference = {
    kReference, "attn.rows", detail::kRowsPass<WallDecodeProblem, reference::wall_decode>, {}};
inline constexpr CpuEngine<WallDecodeProblem, WallDecodeProblem> kWallDecodeCpu = {
    "cpu",
    "attn.wall",
    {detail::kWallDecode, detail::only_kernel<WallDecodeProblem>, cpu::wall_decode_workspace, cpu::wall_decode},
    {}};
inline constexpr CpuEngine<WallCacheProblem, WallCacheProblem> kWallCacheReference = {
    kReference, "attn.rows", detail::kRowsPass<WallCacheProblem, reference::wall_cache>, {}};
inline constexpr CpuEngine<WallCacheProblem, WallCacheProblem> kWallCacheCpu = {
    "cpu",
    "attn.wall",
    {detail::kWallCache, detail::only_kernel<WallCacheProblem>, cpu::wall_cache_workspace, cpu::wall_cache},
    {}};

}  // namespace fla
