//! Small source trees of our own that look to `ucx-apply` as UCX does: the same names, and around them nothing of UCX's.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) const RELEASES: [&str; 3] = ["1.21", "1.22", "1.23"];

/// Every file of a tree by its path, with its bytes.
pub(crate) type Snapshot = BTreeMap<String, Vec<u8>>;

/// A tree that is removed when dropped.
pub(crate) struct StandIn {
    folder: PathBuf,
}

impl StandIn {
    pub(crate) fn new(release: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("ucx-apply-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        for (path, text) in FILES {
            let path = folder.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, of_release(text, release)).unwrap();
        }
        Self { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.folder.join(path)).unwrap()
    }

    pub(crate) fn edit(&self, path: &str, change: impl FnOnce(&str) -> String) {
        std::fs::write(self.folder.join(path), change(&self.read(path))).unwrap();
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut files = Snapshot::new();
        let mut folders = vec![self.folder.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let name = path.strip_prefix(&self.folder).unwrap().to_string_lossy().into_owned();
                    files.insert(name, std::fs::read(path).unwrap());
                }
            }
        }
        files
    }

    /// Applies a diff as a user would.
    pub(crate) fn patch(&self, diff: &str) {
        let mut git = Command::new("git");
        // Outside of any repository, whatever the temporary folder is in.
        git.args(["apply", "--whitespace=nowarn"]).current_dir(&self.folder).env("GIT_CEILING_DIRECTORIES", std::env::temp_dir());
        let mut git = git.stdin(Stdio::piped()).spawn().expect("git is needed for this test");
        git.stdin.take().unwrap().write_all(diff.as_bytes()).unwrap();
        assert!(git.wait().unwrap().success(), "git refuses the diff:\n{diff}");
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The lines for a release: those that begin with `21:`, `22:` and so on are for the releases named.
fn of_release(text: &str, release: &str) -> String {
    let minor = release.strip_prefix("1.").unwrap();
    let mut lines = String::new();
    for line in text.trim_start_matches('\n').lines() {
        let line = match line.split_once(':') {
            Some((releases, line)) if releases.starts_with(|first: char| first.is_ascii_digit()) => {
                if !releases.split(',').any(|name| name == minor) {
                    continue;
                }
                line
            }
            _ => line,
        };
        lines.push_str(&line.replace("MINOR", minor));
        lines.push('\n');
    }
    lines
}

const FILES: [(&str, &str); 9] = [
    (
        "configure.ac",
        "
dnl stand-in
define([ucx_ver_major], 1)  # a comment
define([ucx_ver_minor], MINOR) # another
",
    ),
    (
        "src/uct/cuda/configure.m4",
        "
dnl stand-in
UCX_CHECK_CUDA

AC_STAND_IN
",
    ),
    (
        "src/uct/cuda/Makefile.am",
        "
stand_in_CPPFLAGS = $(BASE_CPPFLAGS) $(CUDA_CPPFLAGS)
stand_in_LIBADD   = one.la \\
                    $(CUDA_LIBS) $(NVML_LIBS)

noinst_HEADERS = \\
\tcuda_ipc/cuda_ipc_cache.h \\
\tstand_in.h

stand_in_SOURCES = \\
\tstand_in.c \\
\tcuda_ipc/cuda_ipc_cache.c
",
    ),
    (
        "src/uct/cuda/cuda_ipc/cuda_ipc_md.h",
        "
#include <stand_in.h>
#include <ucs/config/types.h>

typedef struct {
    int a;
} uct_cuda_ipc_md_config_t;

typedef struct {
    int b;
} uct_cuda_ipc_memh_t;

typedef struct {
    int c;
} uct_cuda_ipc_unpacked_rkey_t;
",
    ),
    (
        "src/uct/cuda/cuda_ipc/cuda_ipc_md.c",
        "
#include \"cuda_ipc.inl\"

static table_t uct_cuda_ipc_md_config_table[] = {
    {\"STAND\", \"in\"},

    {\"ENABLE_MNNVL\", \"try\",
     \"a row of two lines\"},

    {NULL}
};

/* A declaration is no definition. */
static status_t
uct_cuda_ipc_mkey_pack(int a,
                       int b);

static status_t
uct_cuda_ipc_mkey_pack(int a,
                       int b)
{
    int key;

    ucs_list_for_each(key, &memh->list, link) {
        stand_in(key);
    }
found:
    return key;
}

static int
uct_cuda_ipc_is_peer_accessible(int rkey, int cu_dev)
{
    stand_in(rkey);
    pthread_mutex_lock(&component->lock);
    return 0;
}

PROFILED(status_t, uct_cuda_ipc_rkey_unpack,
         (a, b), int a, int b)
{
    unpacked->super.super      = *packed;
    return 0;
}

static status_t uct_cuda_ipc_rkey_release(int rkey)
{
    ucs_free((void *)rkey);
    return 0;
}

static status_t
uct_cuda_ipc_mem_reg(int md)
{
    ucs_list_head_init(&memh->list);
    return 0;
}

static status_t
uct_cuda_ipc_mem_dereg(int md)
{
    ucs_free(memh);
    return 0;
}

static void uct_cuda_ipc_md_close(int md)
{
    ucs_free(md);
}

static status_t
uct_cuda_ipc_md_mem_elem_pack(int md)
{
    if (UCT_CUDADRV_FUNC_LOG_DEBUG(cuCtxGetDevice(&cuda_device)) != UCS_OK) {
        return 1;
    }
    return 0;
}

23:static void uct_cuda_ipc_md_mem_elem_release(int handle)
23:{
23:    uct_cuda_ipc_unmap_memhandle(handle->pid, handle->pid_ns, handle->d_bptr,
23:                                 stand_in);
23:}
23:
static status_t
uct_cuda_ipc_md_open(int md)
{
    static ops_t ops = {
        .close = uct_cuda_ipc_md_close
    };

    uct_cuda_ipc_cache_set_global_limits(ipc_config->cache_max_regions,
                                         stand_in);
    return 0;
}

status_t uct_cuda_ipc_rkey_ptr(int rkey)
{
21,22:    status = UCT_CUDADRV_FUNC_LOG_ERR(cuCtxGetDevice(&cu_dev));
23:    if (rkey_handle->mapped_addr != NULL) {
23:        return 0;
23:    }
    return stand_in(rkey);
}
",
    ),
    (
        "src/uct/cuda/cuda_ipc/cuda_ipc_cache.c",
        "
#include \"cuda_ipc.inl\"

21:status_t uct_cuda_ipc_unmap_memhandle(int pid)
22,23:void uct_cuda_ipc_unmap_memhandle(int pid)
{
    uct_cuda_ipc_cache_t *cache;
21:    uct_cuda_ipc_cache_region_t *region;

    stand_in(cache);
}
",
    ),
    (
        "src/uct/cuda/cuda_ipc/cuda_ipc_ep.c",
        "
#include \"cuda_ipc.inl\"

static status_t
uct_cuda_ipc_post_cuda_async_copy(int ep)
{
21,22:    void *mapped_addr;
23:    const void *mapped_addr;
    int status;

    status = uct_cuda_ipc_get_remote_address(&key->super, stand_in,
                                             &mapped_addr);
    if (status != 0) {
        goto out;
    }

    status = stand_in(cuMemcpyDtoDAsync(dst, src, iov[0].length,
                                        *stream));
    cuda_ipc_event->mapped_addr = mapped_addr;

out:
    return status;
}

23:static status_t
23:uct_cuda_ipc_post_cuda_sgl_async_copy(int ep)
23:{
23:    for (i = 0; i < count; i++) {
23:        status = uct_cuda_ipc_get_remote_address(&key->super, stand_in[i],
23:                                                 &mapped_addr);
23:    }
23:}
23:
int stand_in_end;
",
    ),
    (
        "src/uct/cuda/cuda_ipc/cuda_ipc_iface.c",
        "
#include \"cuda_ipc.inl\"

status_t uct_cuda_ipc_iface_get_device_address(int iface)
{
    if (md->enable_mnnvl || md->fabric_supported) {
        dev_addr->flags = 0;
    }
}

static int
uct_cuda_ipc_iface_is_reachable_v2(int iface)
{
    if (!local_fabric_supported || !remote_fabric_supported) {
        return 0;
    }
    return 1;
}

static status_t uct_cuda_ipc_iface_query(int iface)
{
    stand_in = (md->enable_mnnvl ||
                md->fabric_supported) ? 1 : 2;
}
",
    ),
    (
        "test/gtest/uct/cuda/test_cuda_ipc_md.cc",
        "
22,23:UCS_TEST_P(test_cuda_ipc_md, mkey_pack_posix_fd)
22,23:{
22,23:}
22,23:
22,23:UCS_TEST_P(test_cuda_ipc_md, posix_fd_system_id_mismatch)
22,23:{
22,23:}
22,23:
UCS_TEST_P(test_cuda_ipc_md, stand_in)
{
}

22,23:UCS_TEST_P(test_cuda_ipc_md, posix_fd_same_node_ipc)
22,23:{
22,23:}
",
    ),
];
