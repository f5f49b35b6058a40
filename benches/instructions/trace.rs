//! Counts the instructions of a call, one by one: the CPU traps after each (the trap flag of
//! x86-64), and the handler looks at the next. Those of the kernel's vDSO, which reads clocks, are
//! not counted: each kernel has another number of them.

use libc::{c_int, c_void, siginfo_t, ucontext_t};
use std::io::Error;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static INSTRUCTIONS: AtomicU64 = AtomicU64::new(0);
static LOCKED: AtomicU64 = AtomicU64::new(0);
static CLOCK: AtomicU64 = AtomicU64::new(0);
static HASH: AtomicU64 = AtomicU64::new(0);
static SYSTEM_CALLS: AtomicU64 = AtomicU64::new(0);
/// The addresses of the vDSO.
static VDSO: OnceLock<Range<u64>> = OnceLock::new();

/// What a call has executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Executed {
    /// Instructions.
    pub instructions: u64,
    /// Atomic read-modify-write instructions: those with a LOCK prefix, and exchanges with memory.
    pub locked: u64,
    /// Reads of the time-stamp counter. Each read of a clock has one.
    pub clock: u64,
    /// Multiplications of 64 by 64 bits to 128. The hash function of the library's tables
    /// (foldhash) has some for each look-up. So has the arithmetic of times, which the short path
    /// does not need.
    pub hash: u64,
    /// System calls.
    pub system_calls: u64,
}

impl Executed {
    fn now() -> Self {
        Executed {
            instructions: INSTRUCTIONS.load(Relaxed),
            locked: LOCKED.load(Relaxed),
            clock: CLOCK.load(Relaxed),
            hash: HASH.load(Relaxed),
            system_calls: SYSTEM_CALLS.load(Relaxed),
        }
    }

    fn since(self, before: Self) -> Self {
        Executed {
            instructions: self.instructions - before.instructions,
            locked: self.locked - before.locked,
            clock: self.clock - before.clock,
            hash: self.hash - before.hash,
            system_calls: self.system_calls - before.system_calls,
        }
    }
}

/// Counts an instruction by its first bytes.
extern "C" fn on_trap(_: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes the context of the interrupted thread. Its instruction pointer is
    // at the next instruction, which can be read; eight bytes behind its start are mapped too,
    // except at the end of the last page of code, which holds no code of this program.
    let (at, bytes) = unsafe {
        let registers = &(*context.cast::<ucontext_t>()).uc_mcontext.gregs;
        let at = registers[libc::REG_RIP as usize] as u64;
        (at, *(at as *const [u8; 8]))
    };
    let is_ours = VDSO.get().is_none_or(|vdso| !vdso.contains(&at));
    INSTRUCTIONS.fetch_add(u64::from(is_ours), Relaxed);
    let is_prefix = |byte: &u8| matches!(byte, 0xF0 | 0xF2 | 0xF3 | 0x66 | 0x2E | 0x3E | 0x64 | 0x65);
    let prefixes = bytes.iter().take_while(|byte| is_prefix(byte)).count();
    let rex = bytes.get(prefixes).copied().filter(|byte| byte & 0xF0 == 0x40);
    let code = &bytes[(prefixes + usize::from(rex.is_some())).min(8)..];
    let counter = match *code {
        [0x86 | 0x87, modrm, ..] if modrm < 0xC0 => &LOCKED,
        [0x0F, 0x31, ..] | [0x0F, 0x01, 0xF9, ..] => &CLOCK,
        [0x0F, 0x05, ..] => &SYSTEM_CALLS,
        [0xF7, modrm, ..] if modrm >> 3 & 7 == 4 && rex.is_some_and(|rex| rex & 8 != 0) => &HASH,
        _ if bytes[..prefixes].contains(&0xF0) => &LOCKED,
        _ => return,
    };
    counter.fetch_add(1, Relaxed);
}

/// The addresses of the vDSO, if the kernel maps one.
fn vdso() -> Option<Range<u64>> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let (start, end) =
        maps.lines().find(|line| line.ends_with("[vdso]"))?.split_once(' ')?.0.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    Some(address(start)?..address(end)?)
}

/// Installs the handler of the trap.
///
/// # Errors
/// If the system refuses it.
pub fn install() -> Result<(), Error> {
    if let Some(vdso) = vdso() {
        VDSO.get_or_init(|| vdso);
    }
    // SAFETY: an all-zero action is valid; the handler only reads memory and adds to atomics.
    let refused = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_trap as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGTRAP, &action, null_mut()) != 0
    };
    if refused { Err(Error::last_os_error()) } else { Ok(()) }
}

/// Runs `body` and counts what this thread executes meanwhile.
#[inline(never)]
pub fn traced<R>(body: impl FnOnce() -> R) -> (R, Executed) {
    let before = Executed::now();
    // SAFETY: sets the trap flag, whose handler is installed. The stack is as before afterwards.
    // The red zone is skipped, as the push would overwrite it.
    unsafe {
        std::arch::asm!(
            "lea rsp, [rsp - 128]",
            "pushfq",
            "or qword ptr [rsp], 0x100",
            "popfq",
            "lea rsp, [rsp + 128]",
        );
    }
    let result = body();
    // SAFETY: as above, clears the trap flag.
    unsafe {
        std::arch::asm!(
            "lea rsp, [rsp - 128]",
            "pushfq",
            "and qword ptr [rsp], ~0x100",
            "popfq",
            "lea rsp, [rsp + 128]",
        );
    }
    (result, Executed::now().since(before))
}
