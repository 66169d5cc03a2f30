//! Compiles and runs C programs on a fake machine of their own.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use cuda_ipc_tests::driver::{FakeConfig, TestDir, fake_driver_dir, with_fake_driver};

/// A compiler and the standard it is to follow.
#[derive(Clone, Copy)]
pub(crate) struct Language {
    compiler: &'static str,
    standard: &'static str,
    /// How the compiler calls it.
    name: &'static str,
}

pub(crate) const C99: Language = Language { compiler: "gcc", standard: "-std=c99", name: "c" };
pub(crate) const C11: Language = Language { compiler: "gcc", standard: "-std=c11", name: "c" };
pub(crate) const C17: Language = Language { compiler: "gcc", standard: "-std=c17", name: "c" };
pub(crate) const CXX11: Language = Language { compiler: "g++", standard: "-std=c++11", name: "c++" };

/// Folder of other builds of the libraries than those beside this test.
const LIBRARIES: &str = "C_ABI_LIBRARIES";

/// The exit status of a program in which memcheck has found something.
pub(crate) const MEMCHECK_FOUND: i32 = 99;

const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];
const PKG_CONFIG: &str = include_str!("../../../cuda-ipc-ffi/cuda_ipc.pc.in");

#[derive(Clone, Copy)]
pub(crate) enum Link {
    Dynamic,
    Static,
}

/// An executable.
pub(crate) struct Program(PathBuf);

impl Program {
    pub(crate) fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

/// How a program ended, and what it said.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// A place for programs, and the machine that they run on.
pub(crate) struct Bench {
    folder: TestDir,
    /// Folder of what cargo has built.
    built: PathBuf,
    socket: String,
    sanitize: bool,
    memcheck: bool,
    env: Vec<(&'static str, String)>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let folder = TestDir::new().unwrap();
        let built = std::env::var_os(LIBRARIES).map_or_else(beside_this_test, PathBuf::from);
        let libraries = folder.path().join("lib");
        std::fs::create_dir(&libraries).unwrap();
        for name in ["libcuda_ipc.so", "libcuda_ipc.so.0"] {
            std::os::unix::fs::symlink(built.join("libcuda_ipc.so"), libraries.join(name)).unwrap();
        }
        let socket = folder.path().join("socket").to_str().unwrap().to_owned();
        Self { folder, built, socket, sanitize: false, memcheck: false, env: Vec::new() }
    }

    /// From here on programs are compiled with AddressSanitizer.
    pub(crate) fn sanitize(&mut self) {
        self.sanitize = true;
    }

    /// From here on programs run under valgrind's memcheck, which answers [`MEMCHECK_FOUND`] for a program in which it finds something.
    pub(crate) fn memcheck(&mut self) {
        self.memcheck = true;
    }

    /// From here on it does not look for leaks.
    pub(crate) fn ignore_leaks(&mut self) {
        self.set("ASAN_OPTIONS", "detect_leaks=0");
    }

    /// Sets an environment variable for programs from here on.
    pub(crate) fn set(&mut self, name: &'static str, value: &str) {
        self.env.push((name, value.to_owned()));
    }

    /// Where an exporter listens.
    pub(crate) fn socket(&self) -> &str {
        &self.socket
    }

    /// Whether the libraries under test are another build, made with AddressSanitizer.
    pub(crate) fn has_sanitized_library(&self) -> bool {
        std::env::var_os(LIBRARIES).is_some()
    }

    /// Folder of the built libraries.
    pub(crate) fn built(&self) -> &Path {
        &self.built
    }

    pub(crate) fn example(&self, name: &str, language: Language, link: Link) -> Program {
        self.compile(&root().join("examples/c").join(format!("{name}.c")), language, link)
    }

    pub(crate) fn program(&self, name: &str, language: Language, link: Link) -> Program {
        self.compile(&root().join("tests/tests/c_abi").join(format!("{name}.c")), language, link)
    }

    fn compile(&self, source: &Path, language: Language, link: Link) -> Program {
        let name = source.file_stem().unwrap().to_str().unwrap();
        let kind = if matches!(link, Link::Static) { "static" } else { "dynamic" };
        let program = self.folder.path().join(format!("{name}{}-{kind}", language.standard));
        let mut command = Command::new(language.compiler);
        command.arg(language.standard).args(WARNINGS).arg("-g").args(self.sanitize.then_some("-fsanitize=address"));
        command.arg("-I").arg(root().join("cuda-ipc-ffi/include")).arg("-I").arg(root().join("examples/c"));
        command.args(["-x", language.name]).arg(source).args(["-x", "none", "-o"]).arg(&program).arg("-pthread");
        match link {
            Link::Dynamic => command.arg("-L").arg(self.folder.path().join("lib")).arg("-lcuda_ipc"),
            Link::Static => command.arg(self.built.join("libcuda_ipc.a")).args(native_libraries()),
        };
        // The programs call the driver, too.
        command.arg("-L").arg(fake_driver_dir().unwrap()).arg("-l:libcuda.so.1");
        let output = command.output().unwrap_or_else(|error| panic!("{}: {error}", language.compiler));
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        Program(program)
    }

    fn command(&self, program: &Program) -> Command {
        let mut command = if self.memcheck { Command::new("valgrind") } else { Command::new(&program.0) };
        let mut config = FakeConfig { dir: Some(self.folder.path().to_owned()), ..FakeConfig::default() };
        if self.memcheck {
            // Possibly lost is what a thread has that is just ending.
            command.args(["--quiet", "--leak-check=full", "--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"]);
            command.arg(format!("--error-exitcode={MEMCHECK_FOUND}")).arg(&program.0);
            // Valgrind keeps account of each byte of address space.
            (config.memory_bytes, config.va_bytes) = (Some(1 << 27), Some(1 << 33));
        }
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("CUDA_IPC_")) {
            command.env_remove(name);
        }
        with_fake_driver(&mut command, &config).expect("the fake driver");
        let set = command.get_envs().find(|(name, _)| *name == "LD_LIBRARY_PATH").and_then(|(_, value)| value);
        let mut search = self.folder.path().join("lib").into_os_string();
        search.push(":");
        search.push(set.unwrap());
        command.env("LD_LIBRARY_PATH", search).envs(self.env.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a program to its end.
    pub(crate) fn run(&self, program: &Program, args: &[&str]) -> Output {
        self.start_with(program, args).finish()
    }

    /// Starts an exporter, which listens at the socket.
    pub(crate) fn start(&self, exporter: &Program) -> Running {
        self.start_with(exporter, &[&self.socket])
    }

    /// Starts a program that goes on by itself.
    pub(crate) fn start_with(&self, program: &Program, args: &[&str]) -> Running {
        Running(self.command(program).args(args).spawn().unwrap())
    }

    /// What a tool says.
    pub(crate) fn tool(&self, name: &str, args: &[&str]) -> String {
        let output = Command::new(name).args(args).output().unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

/// A running program; killed when dropped.
pub(crate) struct Running(Child);

impl Running {
    /// Waits for its end.
    pub(crate) fn finish(&mut self) -> Output {
        let (mut out, mut err) = (String::new(), String::new());
        let mut errors = self.0.stderr.take().unwrap();
        // Both at once, since a full pipe would stop the program.
        let reader = std::thread::spawn(move || errors.read_to_string(&mut err).map(|_| err));
        self.0.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        Output { status: self.0.wait().unwrap(), out, err: reader.join().unwrap().unwrap() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Already waited for, in the good cases.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn beside_this_test() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let has_library = |dir: &&Path| dir.file_name().is_some_and(|name| name != "deps") && dir.join("libcuda_ipc.so").exists();
    exe.ancestors().skip(1).take(2).find(has_library).expect("cargo build -p cuda-ipc-ffi").to_owned()
}

/// What the static library needs besides itself.
fn native_libraries() -> impl Iterator<Item = &'static str> {
    PKG_CONFIG.lines().find_map(|line| line.strip_prefix("Libs.private:")).unwrap().split_whitespace()
}

/// The folder of the workspace.
pub(crate) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
