//! How the two processes of a measurement prove who they are, as members of a cluster do.

use crate::error::CliError;
use std::net::IpAddr;
use tensorwire::internals::bootstrap::Prover;
use tensorwire::internals::node::auth_settings;
use tensorwire::{AuthMode, Node, TaskId};

/// The settings of proofs, which the environment may have.
const PROOFS: [&str; 5] = ["auth", "secret_file", "tls_ca", "tls_certificate", "tls_key"];

/// The name of the process that measures (0), or of the one that answers (1).
pub fn name(me: u32) -> Result<TaskId, CliError> {
    TaskId::new("perf", me).map_err(|error| CliError::Failed(error.to_string()))
}

/// The settings by which the two prove who they are. Beyond loopback the environment must have
/// them.
pub fn settings(ip: IpAddr) -> Result<Vec<(&'static str, String)>, CliError> {
    settings_of(ip, |name| std::env::var(name).ok())
}

fn settings_of(
    ip: IpAddr,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Vec<(&'static str, String)>, CliError> {
    let set = |key: &&'static str| Some((*key, variable(&format!("TENSORWIRE_{}", key.to_uppercase()))?));
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
    if set.contains(&("auth", "plain".into())) {
        set.push(("allow_non_loopback", "true".into()));
    }
    Ok(set)
}

/// What proves the name of process `me` to the other one, on a connection with this address.
pub fn prover(me: u32, ip: IpAddr) -> Result<(Prover, AuthMode), CliError> {
    let failed = |error: &dyn std::fmt::Display| CliError::failed("proving who the two processes are", error);
    let mut builder = Node::builder().without_environment().member("perf", me);
    // The addresses of no nodes: the mode alone counts.
    builder = builder.set("cluster", "perf=127.0.0.1:1,127.0.0.1:2");
    for (key, value) in settings(ip)? {
        builder = builder.set(key, value);
    }
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
            settings_of(ip, |name| {
                set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert!(of(here, &[]).unwrap().is_empty());
        let error = of(there, &[]).unwrap_err().to_string();
        assert!(
            error.contains("10.0.0.1 is not loopback") && error.contains("TENSORWIRE_SECRET_FILE"),
            "{error}"
        );
        let secret = of(there, &[("TENSORWIRE_SECRET_FILE", "/s")]).unwrap();
        assert_eq!(secret, [("secret_file", "/s".to_owned())]);
        let plain = of(there, &[("TENSORWIRE_AUTH", "plain")]).unwrap();
        assert_eq!(plain, [("auth", "plain".to_owned()), ("allow_non_loopback", "true".to_owned())]);
    }
}
