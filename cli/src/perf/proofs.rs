//! How the two processes of a measurement prove who they are, as members of a cluster do.

use crate::error::CliError;
use std::ffi::OsString;
use std::net::IpAddr;
use tensorwire::internals::bootstrap::Prover;
use tensorwire::internals::node::auth_settings;
use tensorwire::{AuthMode, Node, TaskId};

/// The variables of proofs, which the environment may have.
const PROOFS: [&str; 5] = [
    "TENSORWIRE_AUTH",
    "TENSORWIRE_SECRET_FILE",
    "TENSORWIRE_TLS_CA",
    "TENSORWIRE_TLS_CERTIFICATE",
    "TENSORWIRE_TLS_KEY",
];

/// The name of the process that measures (0), or of the one that answers (1).
pub fn name(me: u32) -> Result<TaskId, CliError> {
    TaskId::new("perf", me).map_err(|error| CliError::Failed(error.to_string()))
}

/// The variables of the environment by which the two prove who they are. Beyond loopback there must
/// be some.
pub fn variables(ip: IpAddr) -> Result<Vec<(OsString, OsString)>, CliError> {
    variables_of(ip, |name| std::env::var_os(name))
}

fn variables_of(
    ip: IpAddr,
    value: impl Fn(&str) -> Option<OsString>,
) -> Result<Vec<(OsString, OsString)>, CliError> {
    let set = |name: &&str| Some((OsString::from(name), value(name)?));
    let mut set: Vec<_> = PROOFS.iter().filter_map(set).collect();
    if set.is_empty() && !ip.is_loopback() {
        return Err(CliError::failed(
            "joining the two processes",
            format!(
                "{ip} is not loopback, and the two have nothing to prove who they are: set \
                 TENSORWIRE_SECRET_FILE on both hosts (`tensorwire auth secret` makes one), or \
                 TENSORWIRE_AUTH=plain on a network that you trust"
            ),
        ));
    }
    if set.contains(&("TENSORWIRE_AUTH".into(), "plain".into())) {
        set.push(("TENSORWIRE_ALLOW_NON_LOOPBACK".into(), "true".into()));
    }
    Ok(set)
}

/// What proves the name of process `me` to the other one, on a connection with this address.
pub fn prover(me: u32, ip: IpAddr) -> Result<(Prover, AuthMode), CliError> {
    let failed = |error: &dyn std::fmt::Display| CliError::failed("proving who the two processes are", error);
    let builder = Node::builder().environment(variables(ip)?).member("perf", me);
    // The addresses of no nodes: the mode alone counts.
    let builder = builder.set("cluster", "perf=127.0.0.1:1,127.0.0.1:2");
    let config = builder.build().map_err(|error| failed(&error))?;
    let prover = Prover::open(&auth_settings(&config), &name(me)?).map_err(|error| failed(&error))?;
    Ok((prover, config.auth_mode()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_loopback_the_two_prove_who_they_are_or_are_told_not_to() {
        let here: IpAddr = [127, 0, 0, 1].into();
        let there: IpAddr = [10, 0, 0, 1].into();
        let of = |ip, set: &'static [(&str, &str)]| {
            variables_of(ip, |name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
        };
        assert!(of(here, &[]).unwrap().is_empty());
        let error = of(there, &[]).unwrap_err().to_string();
        assert!(
            error.contains("10.0.0.1 is not loopback") && error.contains("TENSORWIRE_SECRET_FILE"),
            "{error}"
        );
        let secret = of(there, &[("TENSORWIRE_SECRET_FILE", "/s")]).unwrap();
        assert_eq!(secret, [("TENSORWIRE_SECRET_FILE".into(), "/s".into())]);
        let plain = of(there, &[("TENSORWIRE_AUTH", "plain")]).unwrap();
        let beyond = ("TENSORWIRE_ALLOW_NON_LOOPBACK".into(), "true".into());
        assert_eq!(plain, [("TENSORWIRE_AUTH".into(), "plain".into()), beyond]);
    }
}
