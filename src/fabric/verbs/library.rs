//! libibverbs, loaded when it is first needed: a program starts without it, and says so only if it
//! is asked for verbs.

use super::sys::*;
use libloading::os::unix as dl;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::OnceLock;

/// The library's name: version 1 of its interface, which has not changed since 2006 but by
/// additions.
pub const NAME: &str = "libibverbs.so.1";

/// Why the library can't be used.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// It could not be loaded.
    #[error(
        "loading {} failed: {why}; install rdma-core's libibverbs (Debian: libibverbs1 and \
         ibverbs-providers; Fedora: \
         libibverbs), or choose another fabric",
        .path.display()
    )]
    Load {
        /// Name or path that was tried.
        path: PathBuf,
        /// The message of the dynamic linker.
        why: String,
    },
    /// It lacks a function.
    #[error("{} has no function {symbol}: {why}; is it rdma-core's library, of version 17 or \
     later?", .path.display())]
    Symbol {
        /// Name or path that was loaded.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
        /// The message of the dynamic linker.
        why: String,
    },
}

macro_rules! library {
    (
        required { $($(#[$doc:meta])* $name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)* }
        optional { $($(#[$odoc:meta])* $oname:ident = $osymbol:literal: fn($($oarg:ty),*) $(-> $oret:ty)?;)* }
    ) => {
        /// The functions of libibverbs that are symbols, as their manual pages describe them. The
        /// inline functions of the header are in [`sys`](super::sys).
        ///
        /// Calling one is unsafe as any call of C is: handles must be of this library and not gone
        /// yet.
        #[derive(Debug)]
        pub struct Library {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            $($(#[$odoc])* pub $oname: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>,)*
        }

        impl Library {
            /// Looks every function up.
            fn of(loaded: &dl::Library, path: &Path) -> Result<Library, LibraryError> {
                Ok(Library {
                    $($name: {
                        let symbol = concat!("ibv_", stringify!($name));
                        // SAFETY: the type is that of the C prototype of this name; the library is
                        // never unloaded.
                        match unsafe { loaded.get(symbol.as_bytes()) } {
                            Ok(found) => *found,
                            Err(error) => {
                                let why = error.to_string();
                                return Err(LibraryError::Symbol { path: path.into(), symbol, why });
                            }
                        }
                    },)*
                    // SAFETY: as above.
                    $($oname: unsafe { loaded.get($osymbol.as_bytes()) }.ok().map(|found| *found),)*
                })
            }
        }
    };
}

library! {
    required {
        /// Lists the devices; to be freed by `free_device_list`.
        get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
        /// Frees a list; devices that were opened stay.
        free_device_list: fn(*mut *mut ibv_device);
        /// Null with an errno if the file of the device cannot be opened.
        open_device: fn(*mut ibv_device) -> *mut ibv_context;
        /// Closes a device of which nothing is left.
        close_device: fn(*mut ibv_context) -> c_int;
        /// Queries a device.
        query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        /// Fills only the fields up to `flags`: call [`Library::port`] instead.
        query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        /// An entry of a port's GID table.
        query_gid: fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        /// An entry of a port's partition key table, in network order.
        query_pkey: fn(*mut ibv_context, u8, c_int, *mut u16) -> c_int;
        /// Makes a protection domain.
        alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
        /// Ends a protection domain.
        dealloc_pd: fn(*mut ibv_pd) -> c_int;
        /// Registers memory.
        reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        /// Ends a registration.
        dereg_mr: fn(*mut ibv_mr) -> c_int;
        /// Makes a completion channel.
        create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
        /// Ends a completion channel that no queue uses.
        destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
        /// Makes a completion queue: device, entries, context, channel, vector.
        create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        /// Ends a completion queue; waits until its events are acknowledged.
        destroy_cq: fn(*mut ibv_cq) -> c_int;
        /// Takes an event from a channel, waiting for one.
        get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        /// Acknowledges events of a queue.
        ack_cq_events: fn(*mut ibv_cq, u32);
        /// Makes a queue pair.
        create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        /// Changes attributes of a queue pair.
        modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        /// Ends a queue pair; waits until its asynchronous events are acknowledged.
        destroy_qp: fn(*mut ibv_qp) -> c_int;
        /// Takes an asynchronous event, waiting for one.
        get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        /// Acknowledges an asynchronous event.
        ack_async_event: fn(*mut ibv_async_event);
    }
    optional {
        /// An entry of a port's GID table with its type: device, port, index, entry, 0, size of the
        /// entry; since rdma-core 32.
        query_gid_ex = "_ibv_query_gid_ex":
            fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
        /// Registers memory with flags that a device may not know, such as relaxed ordering. The
        /// arguments are domain, first byte, length, the address of work requests, and flags. Since
        /// rdma-core 28.
        reg_mr_iova2 = "ibv_reg_mr_iova2": fn(*mut ibv_pd, *mut c_void, usize, u64, u32) -> *mut ibv_mr;
        /// The effect of a fork on registered memory: 2 for none. Since rdma-core 35.
        is_fork_initialized = "ibv_is_fork_initialized": fn() -> u32;
    }
}

impl Library {
    /// The system's library, loaded with the first call.
    ///
    /// # Errors
    /// [`LibraryError`], the same each time.
    pub fn system() -> Result<&'static Library, LibraryError> {
        static LOADED: OnceLock<Result<&'static Library, LibraryError>> = OnceLock::new();
        LOADED.get_or_init(|| Library::open(Path::new(NAME))).clone()
    }

    /// A library with the interface of libibverbs.
    ///
    /// It is never unloaded: its drivers register themselves and start threads.
    ///
    /// # Errors
    /// [`LibraryError`].
    pub fn open(path: &Path) -> Result<&'static Library, LibraryError> {
        // SAFETY: loading runs the library's initialisers; those of libibverbs have no
        // preconditions.
        let loaded = unsafe { dl::Library::open(Some(path), dl::RTLD_NOW | dl::RTLD_LOCAL) }
            .map_err(|error| LibraryError::Load { path: path.into(), why: error.to_string() })?;
        let library = Library::of(&loaded, path)?;
        std::mem::forget(loaded);
        Ok(Box::leak(Box::new(library)))
    }

    /// Queries a port (`ibv_query_port(3)`), in the way that this library offers.
    ///
    /// # Errors
    /// The system's error.
    ///
    /// # Safety
    /// `context` is an opened device of this library.
    pub unsafe fn port(&self, context: *mut ibv_context, port: u8) -> std::io::Result<ibv_port_attr> {
        let mut attr = ibv_port_attr::default();
        // SAFETY: as the caller vouches.
        let result = unsafe { ibv_query_port(context, port, &mut attr) };
        // SAFETY: the older call fills a part of the same struct.
        let result = result.unwrap_or_else(|| unsafe { (self.query_port)(context, port, &mut attr) });
        if result == 0 { Ok(attr) } else { Err(returned(result)) }
    }
}

/// The object that a call has made. A driver that makes none and gives no reason (`bnxt_re`, for a
/// queue pair beyond its limits) refuses an argument.
pub(super) fn made<T>(call: impl FnOnce() -> *mut T) -> std::io::Result<NonNull<T>> {
    // SAFETY: the place of this thread's errno.
    unsafe { *libc::__errno_location() = 0 };
    NonNull::new(call()).ok_or_else(|| match std::io::Error::last_os_error() {
        error if error.raw_os_error() == Some(0) => std::io::Error::from_raw_os_error(libc::EINVAL),
        error => error,
    })
}

/// The error of a call that returned other than 0. The value is an errno (`ibv_modify_qp(3)`) with
/// either sign. Some drivers return -1, with the errno where C keeps it. To be asked right after
/// the call.
pub(super) fn returned(result: c_int) -> std::io::Error {
    match result {
        -1 => std::io::Error::last_os_error(),
        errno => std::io::Error::from_raw_os_error(errno.abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_with_what_to_install() {
        let error = Library::open(Path::new("/nowhere/libibverbs.so.1")).expect_err("not there").to_string();
        assert!(error.contains("/nowhere/libibverbs.so.1") && error.contains("libibverbs1"), "{error}");
    }

    #[test]
    fn a_library_without_the_functions_is_refused_by_the_first_that_it_lacks() {
        let error = Library::open(Path::new("libc.so.6")).expect_err("no verbs").to_string();
        assert!(error.contains("libc.so.6 has no function ibv_get_device_list"), "{error}");
    }

    #[test]
    fn an_error_is_what_the_call_returned_or_minus_one_and_errno() {
        for result in [libc::EINVAL, -libc::EINVAL] {
            assert_eq!(returned(result).raw_os_error(), Some(libc::EINVAL));
        }
        std::fs::File::open("/nowhere/file").expect_err("sets errno");
        assert_eq!(returned(-1).raw_os_error(), Some(libc::ENOENT), "and not EPERM");
    }
}
