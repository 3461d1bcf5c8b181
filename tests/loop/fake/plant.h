#pragma once
enum class Plant { None, Slow, SlowSmall, SlowLarge, Tenth, Cached, SkippedShape, PartialWrite, Relaxed };
constexpr Plant kPlant = Plant::None;
