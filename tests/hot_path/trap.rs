//! Counts the system calls of every thread of this process, with a seccomp filter.
//!
//! The filter turns each call into SIGSYS. The handler counts it for its thread, and then makes the
//! call from the one instruction that the filter permits. So the process goes on, and threads that
//! may enter the kernel (bootstrap, callbacks) do. The calls that begin and end a thread are made
//! with the signal blocked, so the filter of all threads permits them. Threads that move data get
//! one more filter that does not.

pub use machine::{install, thread_id, tighten};

#[cfg(target_arch = "x86_64")]
mod machine {
    use libc::{c_int, c_long, c_void, siginfo_t, sock_filter, sock_fprog, ucontext_t};
    use std::io::Error;
    use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

    std::arch::global_asm!(
        ".global tensorwire_test_gate",
        ".global tensorwire_test_gate_end",
        "tensorwire_test_gate:",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "syscall",
        "tensorwire_test_gate_end:",
        "ret",
    );

    unsafe extern "C" {
        fn tensorwire_test_gate(number: i64, a: i64, b: i64, c: i64, d: i64, e: i64, f: i64) -> i64;
        fn tensorwire_test_gate_end();
    }

    /// The calling thread's id. The call uses the permitted instruction, so it is not counted.
    pub fn thread_id() -> i32 {
        // SAFETY: gettid has no arguments and no effect.
        unsafe { tensorwire_test_gate(libc::SYS_gettid, 0, 0, 0, 0, 0, 0) as i32 }
    }

    /// Permits calls that are made while SIGSYS is blocked (the kernel would kill the process), and
    /// the handler's return.
    const NOT_TRAPPED: [c_long; 10] = [
        libc::SYS_rt_sigreturn,
        libc::SYS_rt_sigprocmask,
        libc::SYS_clone,
        libc::SYS_clone3,
        libc::SYS_vfork,
        libc::SYS_set_robust_list,
        libc::SYS_rseq,
        libc::SYS_madvise,
        libc::SYS_exit,
        libc::SYS_exit_group,
    ];

    // Offsets in `struct seccomp_data`.
    const NUMBER: u32 = 0;
    const INSTRUCTION_LOW: u32 = 8;
    const INSTRUCTION_HIGH: u32 = 12;
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

    const fn statement(code: u16, k: u32) -> sock_filter {
        sock_filter { code, jt: 0, jf: 0, k }
    }

    /// Skips the next statement unless the loaded value equals `k`.
    const fn unless(k: u32) -> sock_filter {
        sock_filter { code: IF_EQUAL, jt: 0, jf: 1, k }
    }

    /// Permits the handler's return, and the end of the process.
    const NEVER_TRAPPED: [c_long; 2] = [libc::SYS_rt_sigreturn, libc::SYS_exit_group];

    fn program(not_trapped: &[c_long]) -> Vec<sock_filter> {
        let gate = tensorwire_test_gate_end as *const () as u64;
        let mut program = vec![
            statement(LOAD, INSTRUCTION_LOW),
            sock_filter { code: IF_EQUAL, jt: 0, jf: 3, k: gate as u32 },
            statement(LOAD, INSTRUCTION_HIGH),
            unless((gate >> 32) as u32),
            statement(RETURN, libc::SECCOMP_RET_ALLOW),
            statement(LOAD, NUMBER),
        ];
        for call in not_trapped {
            program.extend([unless(*call as u32), statement(RETURN, libc::SECCOMP_RET_ALLOW)]);
        }
        program.push(statement(RETURN, libc::SECCOMP_RET_TRAP));
        program
    }

    extern "C" fn trapped(_signal: c_int, _info: *mut siginfo_t, context: *mut c_void) {
        // SAFETY: the kernel hands a SA_SIGINFO handler a valid context, which is this handler's
        // alone.
        let registers = unsafe { &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs };
        let at = |register: c_int| registers[register as usize];
        let number = at(libc::REG_RAX);
        super::super::threads::count_call(number);
        let (a, b, c) = (at(libc::REG_RDI), at(libc::REG_RSI), at(libc::REG_RDX));
        let (d, e, f) = (at(libc::REG_R10), at(libc::REG_R8), at(libc::REG_R9));
        // SAFETY: it is the very call that the thread was about to make.
        let result = unsafe { tensorwire_test_gate(number, a, b, c, d, e, f) };
        registers[libc::REG_RAX as usize] = result;
    }

    fn checked(what: &str, result: c_long) -> Result<(), String> {
        if result == 0 { Ok(()) } else { Err(format!("{what}: {}", Error::last_os_error())) }
    }

    /// Counts the system calls of every thread from now on.
    ///
    /// # Errors
    /// A message, if this machine does not let a process filter its own calls.
    pub fn install() -> Result<(), String> {
        let mut program = program(&NOT_TRAPPED);
        let filter = sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = trapped;
        // SAFETY: the structures are valid for the calls; the handler touches nothing that isn't
        // safe in one.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            checked("sigaction", libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()).into())?;
            checked("PR_SET_NO_NEW_PRIVS", libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
            let (mode, all_threads) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
            checked("seccomp", libc::syscall(libc::SYS_seccomp, mode, all_threads, &filter))
        }
    }

    static STRICT: AtomicPtr<sock_fprog> = AtomicPtr::new(std::ptr::null_mut());
    /// How often the strict filter was installed, and how often that failed.
    static TIGHTENED: [AtomicU32; 2] = [AtomicU32::new(0), AtomicU32::new(0)];

    extern "C" fn take_on(_signal: c_int) {
        let filter = STRICT.load(Ordering::Acquire) as i64;
        let mode = i64::from(libc::SECCOMP_SET_MODE_FILTER);
        // SAFETY: the filter is never freed; it is this thread's own, and everything here may be
        // done in a handler.
        let result = unsafe { tensorwire_test_gate(libc::SYS_seccomp, mode, 0, filter, 0, 0, 0) };
        TIGHTENED[usize::from(result != 0)].fetch_add(1, Ordering::Release);
    }

    /// Counts every call of these threads from now on. Each thread installs another filter in a
    /// signal handler. The threads must not end before the process does.
    ///
    /// # Errors
    /// A message, if one of them fails.
    pub fn tighten(threads: &[i32]) -> Result<(), String> {
        let program = program(&NEVER_TRAPPED).leak();
        let filter = sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        STRICT.store(Box::leak(Box::new(filter)), Ordering::Release);
        let handler: extern "C" fn(c_int) = take_on;
        // SAFETY: the structure is valid for the call.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_RESTART;
            checked("sigaction", libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()).into())?;
        }
        for thread in threads {
            // SAFETY: it sends a signal, which has a handler.
            let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), *thread, libc::SIGUSR1) };
            checked("tgkill", sent)?;
        }
        let count = |at: usize| TIGHTENED[at].load(Ordering::Acquire) as usize;
        while count(0) + count(1) < threads.len() {
            std::hint::spin_loop();
        }
        if count(1) == 0 { Ok(()) } else { Err(format!("{} threads took on no filter", count(1))) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod machine {
    /// The calling thread's id.
    pub fn thread_id() -> i32 {
        // SAFETY: gettid has no arguments and no effect.
        unsafe { libc::syscall(libc::SYS_gettid) as i32 }
    }

    /// Not available on this architecture.
    ///
    /// # Errors
    /// Always.
    pub fn install() -> Result<(), String> {
        Err("the filter's handler is written for x86_64".into())
    }

    /// Not available on this architecture.
    ///
    /// # Errors
    /// Always.
    pub fn tighten(_threads: &[i32]) -> Result<(), String> {
        install()
    }
}
