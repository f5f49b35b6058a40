//! Named sets of settings that are compiled in: files under `tuning/`.

use super::choice::NamedValues;
use std::fmt;

/// A named set of settings, compiled in. Every other source wins over it.
///
/// The setting `profile` chooses one: [`Builder::profile`](super::Builder::profile), the variable
/// `TENSORWIRE_PROFILE`, or a line of a file. A profile names no member, no address and no core, so
/// all processes of a cluster can use it.
///
/// ```
/// use tensorwire::{Config, PollMode, Profile};
/// let settings = Config::builder().without_environment().member("worker", 0);
/// let settings = settings.set("cluster", "worker=127.0.0.1:7000").profile(Profile::LowLatency);
/// assert_eq!(settings.build()?.poll, Some(PollMode::Inline));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Profile {
    /// `low-latency`: a CPU for each process, which spins.
    LowLatency,
    /// `throughput`: large tensors, many at a time.
    Throughput,
    /// `shared-host`: other programs use the CPUs and the memory too.
    SharedHost,
    /// `few-cores`: more processes than CPUs.
    FewCores,
}

impl NamedValues for Profile {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("low-latency", Self::LowLatency),
        ("throughput", Self::Throughput),
        ("shared-host", Self::SharedHost),
        ("few-cores", Self::FewCores),
    ];
}

impl Profile {
    /// Every profile.
    pub const ALL: [Profile; 4] =
        [Profile::LowLatency, Profile::Throughput, Profile::SharedHost, Profile::FewCores];

    /// The name, as in `TENSORWIRE_PROFILE`.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, profile)| *profile == self).map_or("", |(name, _)| name)
    }

    /// The settings as TOML, with the reason and the measured effect of each as a comment.
    pub fn text(self) -> &'static str {
        match self {
            Profile::LowLatency => include_str!("../../tuning/low-latency.toml"),
            Profile::Throughput => include_str!("../../tuning/throughput.toml"),
            Profile::SharedHost => include_str!("../../tuning/shared-host.toml"),
            Profile::FewCores => include_str!("../../tuning/few-cores.toml"),
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
