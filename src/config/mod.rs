//! Configuration: profile, file, environment and builder become one checked value, [`Config`].
//!
//! A setting is a key of a TOML file, an environment variable (`TENSORWIRE_` and the key in upper
//! case) and a method of [`Builder`]. The builder wins over the environment, the environment over
//! the file, the file over the [`Profile`], the profile over the default. Settings of RDMA devices
//! also have the variables that operators know (`RDMA_DEVICE`, ...), and launchers say who the
//! process is (`launched`, `meeting`). Every source is checked, also
//! where a stronger one overrides it. An error is one line: the origin of the value, the value, and
//! what is allowed.
//!
//! One table (`table.rs`) has every key with its type, default, range and meaning. The struct, the
//! builder, the reader of each source and [`reference()`] are generated from it. This module opens
//! no socket and resolves no name. It reads the file and the variables, and nothing else of the
//! machine.
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
mod launched;
mod meeting;
mod nearest;
mod profile;
mod reference;
mod table;

pub use builder::Builder;
pub use choice::{BulkReceive, MemoryWindows, PeerLoss};
pub use error::{ConfigError, Origin};
pub use launched::LaunchedRank;
pub use meeting::{Meeting, StoreAddress, StoreAddressError};
pub use profile::Profile;
pub use reference::{listing, reference};
pub use table::{Config, ConfigValues, setting_variables};

#[cfg(test)]
mod meeting_tests;
#[cfg(test)]
mod profile_tests;
#[cfg(test)]
mod rdma_tests;
#[cfg(test)]
mod source_tests;
#[cfg(test)]
mod tests;
