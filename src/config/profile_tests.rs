//! The profiles: each loads and holds known keys only, and every other source wins over it.

use super::file::of_profile;
use super::tests::{assert_names, base, entry, environment, file};
use super::*;
use crate::engine::{PollMode, WaitStrategy};
use std::collections::BTreeSet;

#[test]
fn every_profile_loads_and_changes_only_the_keys_of_its_file() {
    let defaults = base().build().expect("base").entries();
    for profile in Profile::ALL {
        let config = base().profile(profile).build().unwrap_or_else(|error| panic!("{profile}: {error}"));
        let settings = of_profile(profile).expect("a profile is TOML with known keys");
        let named: BTreeSet<_> = settings.iter().map(|(key, ..)| key.name).collect();
        assert!(!named.is_empty(), "{profile} sets nothing");
        for ((key, value), (_, default)) in config.entries().into_iter().zip(defaults.clone()) {
            if key == "profile" {
                assert_eq!(value.as_deref(), Some(profile.name()));
            } else if named.contains(key) {
                assert!(matches!(config.origin(key), Origin::Profile { profile: p, .. } if p == profile));
            } else {
                assert_eq!(value, default, "{profile} changes {key} without naming it");
            }
        }
    }
}

#[test]
fn a_profile_sets_nothing_that_differs_from_process_to_process() {
    let own = ["job", "task", "cluster", "bind", "allow_non_loopback", "profile", "cores", "numa_node"];
    for profile in Profile::ALL {
        for (key, ..) in of_profile(profile).expect("a profile") {
            let is_own = own.contains(&key.name) || key.name.starts_with("rdma_device");
            assert!(!is_own, "{profile} sets {}", key.name);
        }
    }
}

#[test]
fn each_line_of_a_profile_has_a_comment_with_its_effect() {
    for profile in Profile::ALL {
        let mut comment = String::new();
        for line in profile.text().lines() {
            match line.strip_prefix("# ") {
                Some(text) => comment = format!("{comment} {text}"),
                None if line.contains('=') => {
                    assert!(
                        comment.contains("Measured: "),
                        "{profile}: {line} has no effect in its comment: {comment}"
                    );
                    comment.clear();
                }
                None => comment.clear(),
            }
        }
    }
}

/// `few-cores` sets `poll`, and each further source another value.
#[test]
fn every_other_source_wins_over_the_profile_and_the_profile_over_the_default() {
    let name = [("TENSORWIRE_PROFILE", "few-cores")];
    let poll = |builder: Builder| {
        let config = builder.build().expect("config");
        (entry(&config, "poll").expect("poll has a default"), config.origin("poll"))
    };
    let chosen = entry(&base().profile(Profile::FewCores).build().expect("config"), "poll");
    assert_ne!(chosen, entry(&base().build().expect("config"), "poll"), "the test needs a difference");

    let (value, origin) = poll(base().environment(environment(&name)));
    assert_eq!(Some(value), chosen);
    assert!(matches!(origin, Origin::Profile { profile: Profile::FewCores, .. }), "{origin}");
    assert!(origin.to_string().starts_with("profile few-cores line "), "{origin}");

    let lines = file("profile = 'few-cores'\npoll = 'dedicated'\n");
    let (value, origin) = poll(base().file(lines.path()));
    assert_eq!(value, "dedicated");
    assert!(matches!(origin, Origin::File { line: 2, .. }), "{origin}");

    let variables = [name[0], ("TENSORWIRE_POLL", "auto")];
    let (value, origin) = poll(base().file(lines.path()).environment(environment(&variables)));
    assert_eq!(
        (value.as_str(), origin.to_string().as_str()),
        ("auto", "environment variable TENSORWIRE_POLL")
    );

    let builder = base().file(lines.path()).environment(environment(&variables));
    let (value, origin) = poll(builder.set("poll", "inline"));
    assert_eq!((value.as_str(), origin), ("inline", Origin::Builder));
}

#[test]
fn a_line_of_a_profile_that_contradicts_another_source_is_left_out() {
    let config = |profile, name, value| {
        let builder = base().profile(profile).set(name, value);
        builder.build().unwrap_or_else(|error| panic!("{profile} with {name} = {value}: {error}"))
    };
    for profile in Profile::ALL {
        let adaptive = config(profile, "poll", "adaptive");
        assert_eq!((adaptive.poll, adaptive.wait), (Some(PollMode::Adaptive), None), "{profile}");
        let spin = config(profile, "wait", "spin");
        assert_eq!(spin.wait, Some(WaitStrategy::Spin), "{profile}");
        assert_ne!(spin.poll, Some(PollMode::Adaptive), "{profile}");
        assert_eq!(config(profile, "wait", "auto").poll, config(profile, "task", "0").poll, "{profile}");
    }
}

#[test]
fn the_strongest_source_chooses_the_profile() {
    let lines = file("profile = 'shared-host'\n");
    let profile = |builder: Builder| builder.file(lines.path()).build().expect("config").profile;
    assert_eq!(profile(base()), Some(Profile::SharedHost));
    let variable = || environment(&[("TENSORWIRE_PROFILE", "throughput")]);
    assert_eq!(profile(base().environment(variable())), Some(Profile::Throughput));
    let both = base().environment(variable()).profile(Profile::LowLatency);
    assert_eq!(profile(both), Some(Profile::LowLatency));
}

#[test]
fn the_error_for_an_unknown_profile_lists_those_there_are() {
    let listed = "it must be low-latency, throughput, shared-host or few-cores";
    let error = base().set("profile", "fast").build().expect_err("refused");
    assert_eq!(error.to_string(), format!("profile is \"fast\" (the builder): {listed}"));
    let error = base().environment(environment(&[("TENSORWIRE_PROFILE", "")])).build().expect_err("refused");
    assert_names(&error, &["(environment variable TENSORWIRE_PROFILE)", listed]);
    for profile in Profile::ALL {
        assert!(listed.contains(profile.name()), "{profile}");
    }
}
