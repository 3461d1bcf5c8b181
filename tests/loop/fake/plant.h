#pragma once
enum class Plant { None, Slow, Cached, SkippedShape, PartialWrite, Relaxed };
constexpr Plant kPlant = Plant::None;
