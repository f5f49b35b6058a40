//! Configuration: file, environment and builder become one checked value, [`Config`].
//!
//! A setting is a key of a TOML file, an environment variable (`TENSORWIRE_` and the key in upper case) and
//! a method of [`Builder`]; the builder wins over the environment, the environment over the file, the file
//! over the default. What concerns RDMA devices has the variables that operators know besides (`RDMA_DEVICE`, ...). Every source is checked, also where a stronger one overrides it. What is wrong stops
//! the start with one line: where the value came from, the value, and what is allowed.
//!
//! One table (`table.rs`) names every key with its type, default, range and meaning; the struct, the
//! builder, the reader of each source and [`reference()`] are made from it. This room only checks: it opens
//! no socket, resolves no name, and looks at the machine no further than the file and the variables.
//!
//! ```
//! use tensorwire::Config;
//!
//! let config = Config::builder()
//!     .member("worker", 0)
//!     .set("cluster", "ps=127.0.0.1:4000;worker=127.0.0.1:5000")
//!     .set("pool_size", "64MiB")
//!     .build()?;
//! assert_eq!(config.pool_size, 64 << 20);
//! # Ok::<(), tensorwire::ConfigError>(())
//! ```

mod builder;
mod check;
mod choice;
mod error;
mod file;
mod format;
mod nearest;
mod reference;
mod table;

pub use builder::Builder;
pub use choice::{BulkReceive, PeerLoss};
pub use error::{ConfigError, Origin};
pub use reference::{listing, reference};
pub use table::{Config, ConfigValues};

#[cfg(test)]
mod rdma_tests;
#[cfg(test)]
mod source_tests;
#[cfg(test)]
mod tests;
