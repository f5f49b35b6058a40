//! A root folder without libibverbs, for tests of programs that must start without it.
#![allow(unsafe_code)] // `chroot` in the child

use goblin::elf::Elf;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// The libraries that the dynamic linker loads with a program, and the linker itself.
fn needed(program: &Path) -> (Vec<String>, Option<PathBuf>) {
    let bytes = fs::read(program).expect("the program can be read");
    let elf = Elf::parse(&bytes).expect("an ELF program");
    (elf.libraries.iter().map(|name| (*name).to_owned()).collect(), elf.interpreter.map(PathBuf::from))
}

/// Fails the test if the linker would load an RDMA library with the program.
#[track_caller]
pub fn is_free_of_verbs(program: &Path) {
    let (libraries, _) = needed(program);
    assert!(libraries.iter().any(|name| name.starts_with("libc.")), "{libraries:?}");
    let rdma = |name: &&String| ["ibverbs", "rdma", "mlx", "ibumad"].iter().any(|part| name.contains(part));
    let found: Vec<_> = libraries.iter().filter(rdma).collect();
    assert!(found.is_empty(), "{} needs {found:?} to start", program.display());
}

/// The folder of this machine's libraries: this process has loaded one from it.
fn libc_folder() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").expect("this process's libraries");
    let mut paths = maps.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])));
    let libc =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libc."));
    paths.find(libc).and_then(|libc| libc.parent().map(Path::to_owned)).expect("the C library is loaded")
}

/// A root folder with a program and its libraries, and nothing else.
pub struct Machine(TempDir);

impl Machine {
    pub fn with(program: &Path) -> Self {
        let root = tempfile::tempdir().expect("a folder");
        let put = |from: &Path, to: &Path| {
            let to = root.path().join(to.strip_prefix("/").unwrap_or(to));
            fs::create_dir_all(to.parent().expect("inside the root")).expect("a folder");
            fs::copy(from, to).expect("a copy");
        };
        put(program, Path::new("program"));
        let (libraries, linker) = needed(program);
        if let Some(linker) = linker {
            put(&linker, &linker);
        }
        let folder = libc_folder();
        for library in libraries {
            let path = folder.join(library);
            put(&path, &path);
        }
        // The pool reads /proc/self; without it there is no report.
        fs::create_dir_all(root.path().join("proc/self")).expect("a folder");
        fs::write(root.path().join("proc/self/smaps"), "").expect("a file");
        Machine(root)
    }

    /// The output of the program; `None`, with the reason printed, if this user cannot change the
    /// root folder.
    pub fn says(&self, arguments: &[&str]) -> Option<String> {
        let root = self.0.path().to_owned();
        let mut command = Command::new("/program");
        command.args(arguments).env_clear();
        let enter = move || {
            if rustix::process::chroot(&root).is_err() {
                // SAFETY: a process of one thread, just forked, which has no descriptors to share.
                unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWUSER) }?;
                rustix::process::chroot(&root)?;
            }
            std::env::set_current_dir("/")
        };
        // SAFETY: between fork and exec it makes system calls and no more, as `pre_exec` asks for.
        unsafe { command.pre_exec(enter) };
        match command.output() {
            Ok(output) => {
                let text = [output.stdout, output.stderr].concat();
                Some(String::from_utf8_lossy(&text).into_owned())
            }
            // ENOSPC: the limit of user namespaces.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSPC)) => {
                println!("skipped: a root folder of its own needs root or user namespaces: {error}");
                None
            }
            Err(error) => panic!("the program does not start without libibverbs: {error}"),
        }
    }
}
