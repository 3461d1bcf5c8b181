#include "fla/core/text.h"

#include <gtest/gtest.h>

namespace fla {
namespace {

TEST(Text, ControlCharactersBecomeEscapes) {
  EXPECT_EQ(printable("initial_state.1"), "initial_state.1");
  EXPECT_EQ(printable(""), "");
  EXPECT_EQ(printable("a\nb\tc\rd"), "a\\nb\\tc\\rd");
  EXPECT_EQ(printable("\x1b[31mred\x1b[0m\x07\x7f"), "\\x1b[31mred\\x1b[0m\\x07\\x7f");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
}

TEST(Text, Utf8PassesAndAllElseDoesNot) {
  EXPECT_EQ(printable("\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80"), "\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J"),
            "\\xc2\\x9b"
            "2J");  // U+009b is what ESC [ is
  EXPECT_EQ(printable("\xc2\xa0"), "\xc2\xa0");
  EXPECT_EQ(printable("\x9b"
                      "2J"),
            "\\x9b"
            "2J");
  EXPECT_EQ(printable("\xc3"), "\\xc3");           // cut off
  EXPECT_EQ(printable("\xc0\x9b"), "\\xc0\\x9b");  // a longer spelling of a shorter one
  EXPECT_EQ(printable("\xe0\x82\x9b"), "\\xe0\\x82\\x9b");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // half of a surrogate pair
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
  EXPECT_EQ(printable("\xff"), "\\xff");
}

}  // namespace
}  // namespace fla
