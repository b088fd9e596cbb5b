// The program of a folder's tests: all of them, or those of the file that is named ("cpu/evict").
#include "tests/cpp/support/check.h"

int main(int argc, char** argv) { return check::Run(argc > 1 ? argv[1] : ""); }
