/* What the test programs require, with the library's own words where it does not hold. */
#ifndef TEST_REQUIRE_H
#define TEST_REQUIRE_H

static void require(int holds, const char *what, int line)
{
    if (!holds) {
        cuda_ipc_error_t error;

        error.size = sizeof(error);
        error.text[0] = 0;
        cuda_ipc_last_error(&error);
        fprintf(stderr, "line %d: %s (last error %d: %s)\n", line, what, (int)error.status, error.text);
        exit(1);
    }
}

#define REQUIRE(what) require((what), #what, __LINE__)

#endif
