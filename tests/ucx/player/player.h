/*
 * One process that moves memory by UCX, at a test's command.
 *
 * It reads a command a line from standard input and answers each with one line on standard output: "ok VALUES", or "error CODE WHAT". Handles travel as
 * numbers, so the test keeps all names and this program keeps almost nothing. Between commands it drives its UCX worker, as a server would.
 */
#ifndef PLAYER_H
#define PLAYER_H

#include <stddef.h>
#include <stdint.h>

/* A command: its name, how many arguments it takes, what it does with them. */
struct command {
    const char *name;
    int arguments;
    void (*run)(char **argument);
};

/* The commands of each file; the last one has no name. */
extern const struct command MEMORY_COMMANDS[];
extern const struct command TRANSFER_COMMANDS[];
extern const struct command TRANSPORT_COMMANDS[];

/* Answers the running command. Once. */
void answer(const char *format, ...) __attribute__((format(printf, 1, 2)));
void refuse(long code, const char *what);

/* A number, decimal or 0x. */
uint64_t number(const char *text);
int signed_number(const char *text);

/* Bytes as hexadecimal digits and back; the caller frees. */
char *to_hex(const void *bytes, size_t length);
void *from_hex(const char *text, size_t *length);

/* Milliseconds of a clock that only goes forward. */
double now_ms(void);

/* Drives the worker once, if there is one; whether anything happened. */
int progress(void);

/* Opens the driver and makes the primary context of a device current. Whether it could; otherwise the command is refused. */
int open_driver(int device);

#endif
