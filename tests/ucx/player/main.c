/* Reads commands, runs them, and drives UCX in between. */
#define _GNU_SOURCE

#include "player.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Words of a command line at most. */
#define MOST_WORDS 16

static int answered;

void answer(const char *format, ...)
{
    va_list values;

    answered = 1;
    fputs("ok", stdout);
    if (*format != '\0') {
        fputc(' ', stdout);
    }
    va_start(values, format);
    vprintf(format, values);
    va_end(values);
    fputc('\n', stdout);
    fflush(stdout);
}

void refuse(long code, const char *what)
{
    answered = 1;
    printf("error %ld %s\n", code, what);
    fflush(stdout);
}

uint64_t number(const char *text)
{
    return strtoull(text, NULL, 0);
}

int signed_number(const char *text)
{
    return (int)strtol(text, NULL, 0);
}

char *to_hex(const void *bytes, size_t length)
{
    const unsigned char *from = bytes;
    char *text = malloc(2 * length + 1);
    size_t at;

    for (at = 0; at < length; at++) {
        sprintf(text + 2 * at, "%02x", from[at]);
    }
    text[2 * length] = '\0';
    return text;
}

void *from_hex(const char *text, size_t *length)
{
    size_t at, size = strlen(text) / 2;
    unsigned char *bytes = malloc(size + 1);

    for (at = 0; at < size; at++) {
        unsigned int byte = 0;
        sscanf(text + 2 * at, "%2x", &byte);
        bytes[at] = (unsigned char)byte;
    }
    *length = size;
    return bytes;
}

double now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static const struct command *find(const struct command *commands, const char *name)
{
    for (; commands->name != NULL; commands++) {
        if (strcmp(commands->name, name) == 0) {
            return commands;
        }
    }
    return NULL;
}

static void run(char *line)
{
    char *words[MOST_WORDS + 1] = {NULL}, *rest = NULL;
    const struct command *command;
    int count = 0;

    for (char *word = strtok_r(line, " ", &rest); word != NULL && count < MOST_WORDS; word = strtok_r(NULL, " ", &rest)) {
        words[count++] = word;
    }
    if (count == 0) {
        return;
    }
    command = find(MEMORY_COMMANDS, words[0]);
    if (command == NULL) {
        command = find(TRANSFER_COMMANDS, words[0]);
    }
    if (command == NULL) {
        command = find(TRANSPORT_COMMANDS, words[0]);
    }
    if (command == NULL || command->arguments != count - 1) {
        refuse(-1, "no such command, or not so many arguments");
        return;
    }
    answered = 0;
    command->run(words + 1);
    if (!answered) {
        answer("%s", "");
    }
}

/* Reads what there is and runs every whole line; 0 at the end of the input. */
static int read_commands(void)
{
    static char *buffer;
    static size_t used, room;
    char *end;
    ssize_t got;

    if (room - used < 4096) {
        room += 65536;
        buffer = realloc(buffer, room);
    }
    got = read(STDIN_FILENO, buffer + used, room - used - 1);
    if (got <= 0) {
        return 0;
    }
    used += (size_t)got;
    while ((end = memchr(buffer, '\n', used)) != NULL) {
        size_t line = (size_t)(end - buffer) + 1;
        *end = '\0';
        run(buffer);
        used -= line;
        memmove(buffer, buffer + line, used);
    }
    return 1;
}

int main(void)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};

    for (;;) {
        int busy = progress();
        if (poll(&input, 1, busy ? 0 : 1) > 0 && !read_commands()) {
            /* The test is over. Nothing is closed: a process that just ends is the common case. */
            _exit(0);
        }
    }
}
