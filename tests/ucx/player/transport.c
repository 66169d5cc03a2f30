/* UCX's cuda_ipc by itself, below what UCP decides: a process that opens a key of its own there. */
#define _GNU_SOURCE

#include "player.h"

#include <stdlib.h>
#include <string.h>

#include <uct/api/uct.h>

/*
 * Of UCT's second API, which packages do not have the header of: written down from it, the same in all releases that are tested. A mask of 0 says that nothing
 * is said.
 */
struct no_params {
    uint64_t field_mask;
    uint64_t nothing;
};
ucs_status_t uct_md_mkey_pack_v2(uct_md_h md, uct_mem_h memory, void *address, size_t length, const struct no_params *params, void *key);

/* The component of this name, or NULL. The list lives as long as the process. */
static uct_component_h find_component(const char *name)
{
    uct_component_h *components;
    unsigned count, at;

    if (uct_query_components(&components, &count) != UCS_OK) {
        return NULL;
    }
    for (at = 0; at < count; at++) {
        uct_component_attr_t attributes = {.field_mask = UCT_COMPONENT_ATTR_FIELD_NAME};
        if (uct_component_query(components[at], &attributes) == UCS_OK && strcmp(attributes.name, name) == 0) {
            return components[at];
        }
    }
    return NULL;
}

/* own_key ADDRESS BYTES: registers memory with cuda_ipc, packs its key and opens it here. Answers whether there is a pointer for it, and which. */
static void do_own_key(char **argument)
{
    void *address = (void *)(uintptr_t)number(argument[0]), *key, *local = NULL;
    uct_component_h component = find_component("cuda_ipc");
    uct_md_config_t *config;
    struct no_params params = {0, 0};
    uct_rkey_bundle_t opened;
    uct_md_attr_t attributes;
    uct_mem_h memory;
    ucs_status_t status;
    uct_md_h md;

    if (component == NULL) {
        refuse(-1, "no cuda_ipc");
        return;
    }
    /* Nothing of it is given back: the process ends soon. */
    if ((status = uct_md_config_read(component, NULL, NULL, &config)) != UCS_OK ||
        (status = uct_md_open(component, "cuda_ipc", config, &md)) != UCS_OK || (status = uct_md_query(md, &attributes)) != UCS_OK ||
        (status = uct_md_mem_reg(md, address, number(argument[1]), UCT_MD_MEM_ACCESS_RMA, &memory)) != UCS_OK) {
        refuse(status, "cuda_ipc does not register it");
        return;
    }
    key = calloc(1, attributes.rkey_packed_size);
    if ((status = uct_md_mkey_pack_v2(md, memory, address, number(argument[1]), &params, key)) != UCS_OK ||
        (status = uct_rkey_unpack(component, key, &opened)) != UCS_OK) {
        refuse(status, "cuda_ipc does not open it");
        return;
    }
    status = uct_rkey_ptr(component, &opened, number(argument[0]), &local);
    answer("%d %#llx", status == UCS_OK, (unsigned long long)(uintptr_t)local);
}

const struct command TRANSPORT_COMMANDS[] = {
    {"own_key", 2, do_own_key},
    {NULL, 0, NULL},
};
