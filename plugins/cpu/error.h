// How the native library reports a refusal: a sentence kept per thread, and a nonzero return value.
#pragma once
#include <cstdarg>
#include <cstdio>

namespace edgekv {

// The last sentence of this thread; empty when its last call succeeded.
inline char* error_text() {
  static thread_local char text[512] = "";
  return text;
}

// Keeps the sentence and returns 1, so that a check can end with `return fail("...")`.
__attribute__((format(printf, 1, 2))) inline int fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error_text(), 512, format, arguments);
  va_end(arguments);
  return 1;
}

}  // namespace edgekv
