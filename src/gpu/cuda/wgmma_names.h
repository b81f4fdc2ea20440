// A warpgroup's accumulator d in assembly: the names of 32, 36 or 64 registers, and the operands that stand for them. Macros, since
// a string of assembly takes no parameter.
#pragma once

// clang-format off
#define EK_FLOATS_4(n) "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3])
#define EK_FLOATS_16(n) EK_FLOATS_4(n), EK_FLOATS_4(n + 4), EK_FLOATS_4(n + 8), EK_FLOATS_4(n + 12)
#define EK_FLOATS_32 EK_FLOATS_16(0), EK_FLOATS_16(16)
#define EK_FLOATS_36 EK_FLOATS_32, EK_FLOATS_4(32)
#define EK_FLOATS_64 EK_FLOATS_32, EK_FLOATS_16(32), EK_FLOATS_16(48)
#define EK_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EK_NAMES_36 EK_NAMES_32 ", %32, %33, %34, %35"
#define EK_NAMES_64 \
  EK_NAMES_36 ", %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// clang-format on
