/* UCX: the commands that register memory, exchange keys, and move bytes. One context and one worker for the process. */
#define _GNU_SOURCE

#include "player.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <ucp/api/ucp.h>

static ucp_context_h context;
static ucp_worker_h worker;

int progress(void)
{
    return worker != NULL && ucp_worker_progress(worker) != 0;
}

/* Refuses the command and returns 0 if a UCX call has failed. */
static int worked(ucs_status_t status)
{
    if (status != UCS_OK) {
        refuse(status, ucs_status_string(status));
    }
    return status == UCS_OK;
}

static void *pointer(const char *text)
{
    return (void *)(uintptr_t)number(text);
}

/* open DEVICE: driver, context and worker. */
static void do_open(char **argument)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA};
    ucp_worker_params_t worker_params = {.field_mask = 0};
    ucp_config_t *config;

    if (!open_driver(signed_number(argument[0])) || !worked(ucp_config_read(NULL, NULL, &config)) ||
        !worked(ucp_init(&params, config, &context))) {
        return;
    }
    ucp_config_release(config);
    worked(ucp_worker_create(context, &worker_params, &worker));
}

/* close: gives back what open has made; the test has closed everything else. */
static void do_close(char **argument)
{
    (void)argument;
    ucp_worker_destroy(worker);
    worker = NULL;
    ucp_cleanup(context);
}

/* address: the worker's. */
static void do_address(char **argument)
{
    ucp_address_t *address;
    size_t length;
    char *text;

    (void)argument;
    if (worked(ucp_worker_get_address(worker, &address, &length))) {
        text = to_hex(address, length);
        answer("%s", text);
        free(text);
        ucp_worker_release_address(worker, address);
    }
}

/* connect ADDRESS FAILURES: an endpoint, with UCX's handling of peer failures (1) or without (0). */
static void do_connect(char **argument)
{
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE};
    size_t length;
    void *address = from_hex(argument[0], &length);
    ucp_ep_h endpoint;

    params.address = address;
    params.err_mode = number(argument[1]) != 0 ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
    if (worked(ucp_ep_create(worker, &params, &endpoint))) {
        answer("%p", (void *)endpoint);
    }
    free(address);
}

/* Drives the worker until the request is complete, for so long at most. */
static ucs_status_t complete(void *request, double timeout_ms)
{
    double end = now_ms() + timeout_ms;
    ucs_status_t status;

    if (request == NULL) {
        return UCS_OK;
    }
    if (UCS_PTR_IS_ERR(request)) {
        return UCS_PTR_STATUS(request);
    }
    while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS && now_ms() < end) {
        if (!progress()) {
            usleep(20);
        }
    }
    if (status != UCS_INPROGRESS) {
        ucp_request_free(request);
    }
    return status;
}

/* disconnect ENDPOINT */
static void do_disconnect(char **argument)
{
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};

    worked(complete(ucp_ep_close_nbx(pointer(argument[0]), &params), 10e3));
}

/* register ADDRESS BYTES TYPED: memory, with its type said (1) or for UCX to find out (0). */
static void do_register(char **argument)
{
    ucp_mem_map_params_t params = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH};
    ucp_mem_h memory;

    params.address = pointer(argument[0]);
    params.length = number(argument[1]);
    if (number(argument[2]) != 0) {
        params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        params.memory_type = UCS_MEMORY_TYPE_CUDA;
    }
    if (worked(ucp_mem_map(context, &params, &memory))) {
        answer("%p", (void *)memory);
    }
}

/* deregister MEMORY */
static void do_deregister(char **argument)
{
    worked(ucp_mem_unmap(context, pointer(argument[0])));
}

/* pack MEMORY: the key of registered memory. */
static void do_pack(char **argument)
{
    void *key;
    size_t length;
    char *text;

    if (worked(ucp_rkey_pack(context, pointer(argument[0]), &key, &length))) {
        text = to_hex(key, length);
        answer("%s", text);
        free(text);
        ucp_rkey_buffer_release(key);
    }
}

/* unpack ENDPOINT KEY */
static void do_unpack(char **argument)
{
    size_t length;
    void *key = from_hex(argument[1], &length);
    ucp_rkey_h unpacked;

    if (worked(ucp_ep_rkey_unpack(pointer(argument[0]), key, &unpacked))) {
        answer("%p", (void *)unpacked);
    }
    free(key);
}

/* drop KEY: what unpack has made. */
static void do_drop(char **argument)
{
    ucp_rkey_destroy(pointer(argument[0]));
}

/* Answers with the request, or 0 if it is complete, and how UCX describes it. */
static void started(void *request)
{
    char text[512] = "";
    ucp_request_attr_t attributes = {
        .field_mask = UCP_REQUEST_ATTR_FIELD_INFO_STRING | UCP_REQUEST_ATTR_FIELD_INFO_STRING_SIZE,
        .debug_string = text,
        .debug_string_size = sizeof(text),
    };

    if (UCS_PTR_IS_ERR(request)) {
        worked(UCS_PTR_STATUS(request));
        return;
    }
    if (request != NULL) {
        ucp_request_query(request, &attributes);
    }
    answer("%#llx %s", (unsigned long long)(uintptr_t)request, text);
}

/* get ENDPOINT KEY REMOTE LOCAL BYTES MEMORY: begins to read; MEMORY is the registration of the local address, or 0. */
static void do_get(char **argument)
{
    ucp_request_param_t params = {.op_attr_mask = 0};

    if (number(argument[5]) != 0) {
        params.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH;
        params.memh = pointer(argument[5]);
    }
    started(ucp_get_nbx(pointer(argument[0]), pointer(argument[3]), number(argument[4]), number(argument[2]), pointer(argument[1]), &params));
}

/* put ENDPOINT KEY REMOTE LOCAL BYTES MEMORY: begins to write, likewise. */
static void do_put(char **argument)
{
    ucp_request_param_t params = {.op_attr_mask = 0};

    if (number(argument[5]) != 0) {
        params.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH;
        params.memh = pointer(argument[5]);
    }
    started(ucp_put_nbx(pointer(argument[0]), pointer(argument[3]), number(argument[4]), number(argument[2]), pointer(argument[1]), &params));
}

/* wait REQUEST MILLISECONDS */
static void do_wait(char **argument)
{
    worked(complete(pointer(argument[0]), (double)number(argument[1])));
}

/* poll REQUEST: drives the worker a little and says whether the request is complete. It stays the caller's to wait for. */
static void do_poll(char **argument)
{
    int at;

    for (at = 0; at < 100; at++) {
        progress();
    }
    answer("%d", ucp_request_check_status(pointer(argument[0])) != UCS_INPROGRESS);
}

/* flush ENDPOINT MILLISECONDS: until all that was written there has arrived. */
static void do_flush(char **argument)
{
    ucp_request_param_t params = {.op_attr_mask = 0};

    worked(complete(ucp_ep_flush_nbx(pointer(argument[0]), &params), (double)number(argument[1])));
}

/* Drives the worker until the request is complete, without a pause: for times. */
static ucs_status_t spin(void *request)
{
    ucs_status_t status;

    if (request == NULL) {
        return UCS_OK;
    }
    if (UCS_PTR_IS_ERR(request)) {
        return UCS_PTR_STATUS(request);
    }
    while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) {
        progress();
    }
    ucp_request_free(request);
    return status;
}

/*
 * turns WAY ENDPOINT KEY REMOTE KEY REMOTE LOCAL BYTES MEMORY COUNT: so many pairs of transfers, of the first memory and the second in strict turns, each begun when
 * the one before it has arrived. WAY is get or put; a put has arrived when the endpoint is flushed. Answers with the microseconds of each.
 */
static void do_turns(char **argument)
{
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH, .memh = pointer(argument[8])}, none = {.op_attr_mask = 0};
    int put = strcmp(argument[0], "put") == 0;
    uint64_t at, transfers = 2 * number(argument[9]);
    ucp_ep_h endpoint = pointer(argument[1]);
    void *local = pointer(argument[6]);
    size_t bytes = number(argument[7]), used = 0, room = 32 * transfers + 1;
    char *text = calloc(1, room);

    for (at = 0; at < transfers; at++) {
        char **source = argument + 2 + 2 * (at % 2);
        ucp_rkey_h key = pointer(source[0]);
        double start = now_ms();
        ucs_status_t status = put ? spin(ucp_put_nbx(endpoint, local, bytes, number(source[1]), key, &params)) :
                                    spin(ucp_get_nbx(endpoint, local, bytes, number(source[1]), key, &params));

        if (status == UCS_OK && put) {
            status = spin(ucp_ep_flush_nbx(endpoint, &none));
        }
        if (!worked(status)) {
            free(text);
            return;
        }
        used += (size_t)snprintf(text + used, room - used, "%s%.3f", at == 0 ? "" : " ", (now_ms() - start) * 1e3);
    }
    answer("%s", text);
    free(text);
}

const struct command TRANSFER_COMMANDS[] = {
    {"open", 1, do_open},
    {"close", 0, do_close},
    {"address", 0, do_address},
    {"connect", 2, do_connect},
    {"disconnect", 1, do_disconnect},
    {"register", 3, do_register},
    {"deregister", 1, do_deregister},
    {"pack", 1, do_pack},
    {"unpack", 2, do_unpack},
    {"drop", 1, do_drop},
    {"get", 6, do_get},
    {"put", 6, do_put},
    {"wait", 2, do_wait},
    {"poll", 1, do_poll},
    {"flush", 2, do_flush},
    {"turns", 10, do_turns},
    {NULL, 0, NULL},
};
