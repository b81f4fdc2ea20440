// Whether a sanitizer watches this program. Code is five to twenty times slower then, so a test that repeats one thing many
// times repeats it less often: the Release tests repeat it in full.
#pragma once

namespace evenkeel {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace evenkeel
