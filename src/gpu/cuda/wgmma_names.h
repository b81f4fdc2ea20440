// A warpgroup's accumulator d in assembly: the names of its registers, and the operands that stand for them. Macros, since
// a string of assembly takes no parameter.
#pragma once

// clang-format off
#define EK_FLOATS_4(n) "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3])
#define EK_FLOATS_8(n) EK_FLOATS_4(n), EK_FLOATS_4(n + 4)
#define EK_FLOATS_16(n) EK_FLOATS_8(n), EK_FLOATS_8(n + 8)
#define EK_FLOATS_32 EK_FLOATS_16(0), EK_FLOATS_16(16)
#define EK_FLOATS_36 EK_FLOATS_32, EK_FLOATS_4(32)
#define EK_FLOATS_40 EK_FLOATS_32, EK_FLOATS_8(32)
#define EK_FLOATS_56 EK_FLOATS_40, EK_FLOATS_16(40)
#define EK_FLOATS_64 EK_FLOATS_56, EK_FLOATS_8(56)
#define EK_FLOATS_96 EK_FLOATS_64, EK_FLOATS_16(64), EK_FLOATS_16(80)
#define EK_FLOATS_128 EK_FLOATS_96, EK_FLOATS_16(96), EK_FLOATS_16(112)
#define EK_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EK_NAMES_36 \
  EK_NAMES_32 ", %32, %33, %34, %35"
#define EK_NAMES_40 \
  EK_NAMES_36 ", %36, %37, %38, %39"
#define EK_NAMES_56 \
  EK_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
#define EK_NAMES_64 \
  EK_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define EK_NAMES_96 \
  EK_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define EK_NAMES_128 \
  EK_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// clang-format on
