//! Ctrl-C and `kill`, handled on a thread of their own instead of in a signal handler.
#![allow(unsafe_code)] // The standard library has no signals: four calls of libc.

use std::io;
use std::mem::MaybeUninit;

/// The signals that ask a program to end.
const ENDING: [(i32, &str); 2] = [(libc::SIGINT, "SIGINT"), (libc::SIGTERM, "SIGTERM")];

/// Makes SIGINT and SIGTERM run `then` with the signal's name, on a thread of its own. Call it
/// before any thread is started: threads inherit the blocked signals.
pub fn on_ending(mut then: impl FnMut(&'static str) + Send + 'static) -> io::Result<()> {
    let set = ending_set();
    mask(libc::SIG_BLOCK, &set)?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        loop {
            let mut signal = 0;
            // SAFETY: both point to values of ours that live longer than the call.
            let error = unsafe { libc::sigwait(&set, &mut signal) };
            if let (0, Some((_, name))) = (error, ENDING.iter().find(|(number, _)| *number == signal)) {
                then(name);
            }
        }
    })?;
    Ok(())
}

/// In a child: unblocks the signals that the parent has blocked.
pub fn unblock() -> io::Result<()> {
    mask(libc::SIG_UNBLOCK, &ending_set())
}

fn ending_set() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the set that it is given; `sigaddset` then gets an
    // initialised one and a signal that exists. Neither can fail for these.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for (signal, _) in ENDING {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

fn mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: `set` is initialised, and a null pointer means that the old mask is not wanted.
    match unsafe { libc::pthread_sigmask(how, set, std::ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// The number and name of a signal: `9 (SIGKILL)`.
pub fn name(signal: i32) -> String {
    let name = match signal {
        libc::SIGKILL => "SIGKILL",
        libc::SIGTERM => "SIGTERM",
        libc::SIGINT => "SIGINT",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGBUS => "SIGBUS",
        libc::SIGABRT => "SIGABRT",
        libc::SIGILL => "SIGILL",
        libc::SIGFPE => "SIGFPE",
        _ => return signal.to_string(),
    };
    format!("{signal} ({name})")
}
