//! The tests' side of the fake libibverbs: it compiles the library, loads a copy for each test,
//! sends commands and reads the log.
#![allow(unsafe_code)] // calls of a loaded library
#![allow(dead_code)] // each test uses what it needs

use libloading::os::unix as dl;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::verbs::library::Library;

type Call = unsafe extern "C" fn(*const u8, usize, *mut u8, usize) -> usize;

type Watch = unsafe extern "C" fn(extern "C" fn(), extern "C" fn());

/// One device with one active Ethernet port, RoCE v2 over IPv4 at index 1.
pub const ONE_NIC: &str = "
device name=fake_0
port
gid index=0 type=1 gid=00000000000000000000ffff0a000001
gid index=1 type=2 gid=00000000000000000000ffff0a000001";

/// A copy of the fake library with devices of its own.
pub struct Fake {
    pub library: &'static Library,
    call: dl::Symbol<Call>,
    loaded: dl::Library,
}

/// A line of the log: a call and its arguments.
#[derive(Debug)]
pub struct Line {
    pub word: String,
    fields: HashMap<String, String>,
}

impl Line {
    /// The text of a field.
    pub fn text(&self, name: &str) -> &str {
        self.fields.get(name).unwrap_or_else(|| panic!("{self:?} has no {name}"))
    }

    /// The number of a field.
    pub fn number(&self, name: &str) -> u64 {
        self.text(name).parse().unwrap_or_else(|_| panic!("{name} of {self:?} is no number"))
    }
}

fn lines(text: &str) -> Vec<Line> {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let word = words.next().unwrap_or_default().to_owned();
        let fields = words.filter_map(|w| w.split_once('=')).map(|(n, v)| (n.into(), v.into())).collect();
        Line { word, fields }
    };
    text.lines().map(line).collect()
}

/// The reason if there is no fake here: no compiler.
pub fn skipped() -> Option<String> {
    let rustc = rustc();
    match Command::new(&rustc).arg("--version").output() {
        Ok(_) => None,
        Err(error) => Some(format!("{} can't be run: {error}", rustc.display())),
    }
}

fn rustc() -> PathBuf {
    std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()).into()
}

/// The path of the compiled fake. It is compiled again if a source has changed.
fn compiled(cfgs: &[&str]) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut hasher = DefaultHasher::new();
    cfgs.hash(&mut hasher);
    for folder in ["tests/fake_verbs", "src/fabric/verbs/sys"] {
        let mut files: Vec<PathBuf> = std::fs::read_dir(root.join(folder))
            .expect("the sources")
            .map(|entry| entry.expect("the sources").path())
            .filter(|path| !path.ends_with("driver.rs"))
            .collect();
        files.sort_unstable();
        files.iter().for_each(|file| std::fs::read(file).expect("a source").hash(&mut hasher));
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let made = folder.join(format!("fake-ibverbs-{:016x}.so", hasher.finish()));
    if made.exists() {
        return made;
    }
    std::fs::create_dir_all(folder).expect("cargo's folder for tests");
    // Written under another name first, because another test program may load it.
    let half = tempfile::NamedTempFile::new_in(folder).expect("a file");
    let mut command = Command::new(rustc());
    command.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "ibverbs"]);
    command.args(["-C", "opt-level=1", "-C", "panic=abort", "-C", "strip=symbols"]);
    command.args(cfgs.iter().flat_map(|cfg| ["--cfg", cfg]));
    if cfgs.contains(&"as_system") {
        // A loaded library is found by this name.
        command.args(["-C", "link-arg=-Wl,-soname,libibverbs.so.1"]);
    }
    let output = command
        .arg("-o")
        .arg(half.path())
        .arg(root.join("tests/fake_verbs/lib.rs"))
        .output()
        .expect("rustc runs, as `skipped` has seen");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "the fake does not compile cleanly:\n{said}");
    half.persist(&made).expect("renamed");
    made
}

impl Fake {
    /// A copy with the devices of the script.
    pub fn new(script: &str) -> Self {
        Fake::load(script, &[])
    }

    /// A copy like an old rdma-core, without the newer functions.
    pub fn old(script: &str) -> Self {
        Fake::load(script, &["without_optional"])
    }

    /// A copy that this process finds by name from now on, like the system's. To be called once,
    /// before the library is looked up.
    pub fn system(script: &str) -> Self {
        let fake = Fake::load(script, &["as_system"]);
        let system = Library::system().expect("a library of that name is loaded");
        assert!(
            std::ptr::fn_addr_eq(system.alloc_pd, fake.library.alloc_pd),
            "the system's own was loaded before"
        );
        fake
    }

    fn load(script: &str, cfgs: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let copy = folder.path().join("libibverbs.so.1");
        std::fs::copy(compiled(cfgs), &copy).expect("copied");
        let library = Library::open(&copy).expect("it has every symbol");
        // A library is never unloaded. Without a reference it would count as a leak.
        static OPENED: Mutex<Vec<&'static Library>> = Mutex::new(Vec::new());
        OPENED.lock().expect("nobody panics with it").push(library);
        // SAFETY: the same library once more; its initialisers have no conditions.
        let loaded =
            unsafe { dl::Library::open(Some(&copy), dl::RTLD_NOW | dl::RTLD_LOCAL) }.expect("loaded");
        // SAFETY: the type is that of the fake's function.
        let call = unsafe { loaded.get::<Call>(b"fake_command") }.expect("the fake has it");
        let fake = Fake { library, call, loaded };
        fake.run(script);
        fake
    }

    /// Runs commands, one per line, and returns the answer.
    pub fn run(&self, commands: &str) -> String {
        let mut answer = vec![0; 1 << 20];
        loop {
            let (bytes, room) = (commands.as_bytes(), answer.len());
            // SAFETY: both are as long as is said.
            let len = unsafe { (self.call)(bytes.as_ptr(), bytes.len(), answer.as_mut_ptr(), room) };
            if len <= room {
                answer.truncate(len);
                return String::from_utf8(answer).expect("text");
            }
            answer.resize(len, 0); // only commands without effect have long answers
        }
    }

    /// Has these functions called, on the calling thread, around each call that posts, polls or
    /// arms.
    pub fn watch(&self, entered: extern "C" fn(), left: extern "C" fn()) {
        // SAFETY: the type is that of the fake's function.
        let watch = unsafe { self.loaded.get::<Watch>(b"fake_watch") }.expect("the fake has it");
        // SAFETY: functions of this type.
        unsafe { watch(entered, left) };
    }

    /// The log of calls, in order.
    pub fn log(&self) -> Vec<Line> {
        lines(&self.run("log"))
    }

    /// The log of calls with one name.
    pub fn calls(&self, word: &str) -> Vec<Line> {
        self.log().into_iter().filter(|line| line.word == word).collect()
    }

    /// The existing queue pairs, oldest first.
    pub fn pairs(&self) -> Vec<Line> {
        lines(&self.run("pairs"))
    }

    /// Asserts that there was no misuse.
    pub fn assert_no_misuse(&self) {
        let misuses = self.run("misuses");
        assert!(misuses.is_empty(), "the library was misused:\n{misuses}");
    }

    /// Asserts that there was no misuse and that no object is left. A thread that drops memory
    /// elsewhere in the process holds the registrations of every fabric for a moment.
    pub fn assert_clean(&self) {
        self.assert_no_misuse();
        let began = Instant::now();
        while !self.run("left").is_empty() && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let left = self.run("left");
        assert!(left.is_empty(), "left over: {left}");
    }
}
