// The compiled part of the fmt library, once for the whole program. Debian packages it as a shared library only, which
// the program must not need where it runs; and in every file (FMT_HEADER_ONLY) it costs 3.5 s of compile time each.
// Only the functions that fmt declares without defining stand here; the build tries this file's way only with the
// versions of fmt that it knows (CMakeLists.txt).
#include <fmt/format-inl.h>

namespace fmt {
inline namespace v9 {
namespace detail {

template thousands_sep_result<char> thousands_sep_impl(locale_ref);
template char decimal_point_impl(locale_ref);
template void buffer<char>::append(const char*, const char*);
template void vformat_to(buffer<char>&, string_view, basic_format_args<buffer_context<char>>, locale_ref);
template dragonbox::decimal_fp<float> dragonbox::to_decimal(float) noexcept;
template dragonbox::decimal_fp<double> dragonbox::to_decimal(double) noexcept;

}  // namespace detail
}  // namespace v9
}  // namespace fmt
