//! The instructions of a tensor on shared memory, counted one by one, and a bound for each figure.
//!
//! `cargo bench --bench instructions` prints the figures. With `-- --check` it fails if a figure is
//! above its bound in `bounds.txt`. A bound is at most 5 % above its figure, as unrelated changes
//! move what the compiler inlines. Bounds may only fall.
#![allow(unsafe_code)] // the trap flag, and a counting global allocator

#[cfg(target_arch = "x86_64")]
mod phases;
#[cfg(target_arch = "x86_64")]
mod trace;

fn main() {
    #[cfg(target_arch = "x86_64")]
    phases::run(std::env::args().any(|argument| argument == "--check"));
    #[cfg(not(target_arch = "x86_64"))]
    println!("instructions: this CPU has no trap flag");
}
