// Code of others in a process of its own: whatever it does to that process, ours is left to say so.
#pragma once

#include <functional>
#include <string_view>

namespace evenkeel::cli {

// Runs `work` in a child and gives its exit code back. A child that ends in any other way, by exit() as by a signal, is
// reported with the latest doing(). DataError after an exit, whatever its code; after a signal this process ends by the same.
// In the child `work` returns its code or throws, as anywhere. REQUIRES: one thread.
int in_child_process(const std::function<int()>& work);
// What the code of others is asked to do now: "load ./libmine.so". Of no effect outside of in_child_process.
void doing(std::string_view what);

}  // namespace evenkeel::cli
