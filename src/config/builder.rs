//! The sources of settings, and how they become one [`Config`].

use super::check;
use super::error::{ConfigError, Origin};
use super::file;
use super::format::{Format, InvalidValue, OneOf};
use super::nearest::nearest;
use super::profile::Profile;
use super::table::{Config, ConfigValues, KEYS, Key, Origins, PREFIX, variable};
use crate::wire::quote;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// Prefixes of variables of this crate that are not settings: for tests, and for builds.
const RESERVED: [&str; 2] = ["TENSORWIRE_TEST_", "TENSORWIRE_BUILD_"];

/// Collects settings from a file, the environment and the program; [`Builder::build`] checks them
/// all.
///
/// The methods with the names of keys set those keys. The program's values win over the
/// environment, the environment over the file, the file over the [`Profile`], the profile over the
/// defaults. The last call for a key wins.
///
/// What no source says is taken from the variables of launchers ([`LaunchedRank`]): who this
/// process is, and with [`Builder::start`] the cluster.
///
/// [`LaunchedRank`]: crate::LaunchedRank
///
/// The builder reads the environment of the process by default: for each key a variable, for
/// example `TENSORWIRE_POOL_SIZE`. Settings of RDMA devices also have the names that operators
/// know, for example `RDMA_GID_INDEX` (`tensorwire config` lists them). Two variables that set one
/// key to different values are an error. A variable that begins with `TENSORWIRE_` and belongs to
/// no key is an error, except `TENSORWIRE_TEST_*` and `TENSORWIRE_BUILD_*`.
///
/// ```
/// use tensorwire::Node;
/// let settings = Node::builder().without_environment().member("worker", 0);
/// let refused = settings.set("cluster", "worker=127.0.0.1:7000").set("pool_size", "much").build();
/// assert!(refused.unwrap_err().to_string().contains("pool_size"));
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until `build`"]
pub struct Builder {
    file: Option<PathBuf>,
    /// `None`: the environment of the process.
    environment: Option<Variables>,
    set: Vec<(String, String)>,
}

pub(super) type Variables = BTreeMap<OsString, OsString>;

impl Config {
    /// Starts with the defaults and the environment of the process.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl Builder {
    /// Reads this TOML file, below the environment. Of several files only the last one is read.
    pub fn file(mut self, path: impl Into<PathBuf>) -> Self {
        self.file = Some(path.into());
        self
    }

    /// Does not read the environment: only the file, if one is given, and the program's settings
    /// count.
    pub fn without_environment(self) -> Self {
        self.environment([])
    }

    /// Reads these variables instead of the environment of the process.
    pub fn environment(mut self, variables: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        self.environment = Some(variables.into_iter().collect());
        self
    }

    /// Sets a key by its name in a file, such as `pool_size`. The value is spelled as in the
    /// environment.
    pub fn set(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.set.push((key.into(), value.into()));
        self
    }

    /// Sets `job` and `task`: the member of the cluster that this process is.
    pub fn member(self, job: &str, task: u32) -> Self {
        self.set("job", job).task(task)
    }

    /// Reads the file and the environment, and checks every value and how they fit together.
    ///
    /// # Errors
    /// The first error of the file and the variables, as one line with the origin, the value and
    /// the allowed values:
    ///
    /// * a file that can't be read or is not TOML;
    /// * an unknown key or variable;
    /// * a value that is not allowed;
    /// * a required key without value;
    /// * settings that contradict each other.
    pub fn build(self) -> Result<Config, ConfigError> {
        self.collect()?.0.finish()
    }

    /// The settings of all sources, and the variables.
    pub(super) fn collect(&self) -> Result<(RawSettings, Variables), ConfigError> {
        let ignores_environment = self.environment.as_ref().is_some_and(Variables::is_empty);
        let mut settings =
            RawSettings { file: self.file.clone(), ignores_environment, ..RawSettings::default() };
        for key in KEYS {
            if let Some(text) = key.default {
                settings.put(key, text.to_string(), Origin::Default)?;
            }
        }
        if let Some(path) = &self.file {
            for (key, text, origin) in file::read(path)? {
                settings.put(key, text, origin)?;
            }
        }
        let environment = self.environment.clone().unwrap_or_else(|| std::env::vars_os().collect());
        settings.put_environment(&environment)?;
        for (name, text) in &self.set {
            let key = Key::named(name).ok_or_else(|| unknown(name, Origin::Builder))?;
            settings.put(key, text.clone(), Origin::Builder)?;
        }
        settings.put_profile()?;
        settings.put_launched(&environment)?;
        Ok((settings, environment))
    }
}

/// The error for a key that does not exist.
pub(super) fn unknown(name: &str, origin: Origin) -> ConfigError {
    let hint = match nearest(name) {
        Some(key) => format!("did you mean {key}?"),
        None => format!("the keys are {}", KEYS.iter().map(|key| key.name).collect::<Vec<_>>().join(", ")),
    };
    ConfigError::UnknownKey { origin, key: name.chars().take(80).collect(), hint }
}

/// Refuses a variable that has this crate's prefix and belongs to no key.
fn check_variable(name: &str) -> Result<(), ConfigError> {
    let Some(key) = name.strip_prefix(PREFIX) else { return Ok(()) };
    let is_reserved = RESERVED.iter().any(|prefix| name.starts_with(prefix));
    if is_reserved || KEYS.iter().any(|key| key.variable() == name) {
        return Ok(());
    }
    let hint = match nearest(key) {
        Some(key) => format!("did you mean {}?", variable(key)),
        None => "unset it, or see `tensorwire config` for those that there are".into(),
    };
    let name: String = name.chars().take(80).collect();
    Err(ConfigError::UnknownKey { origin: Origin::Variable { name: name.clone() }, key: name, hint })
}

/// The error for `text` as the value of `key`.
pub(super) fn wrong(key: &Key, text: &str, origin: Origin, refusal: InvalidValue) -> ConfigError {
    let why = refusal.unwrap_or_else(|| format!("it must be {}", key.allowed));
    ConfigError::Value { origin, key: key.name, value: quote(text), why }
}

/// The strongest text of each key so far. Each text has been checked.
#[derive(Default)]
pub(super) struct RawSettings {
    texts: BTreeMap<&'static str, (String, Origin)>,
    file: Option<PathBuf>,
    /// The builder was told not to read the environment.
    ignores_environment: bool,
}

impl RawSettings {
    /// The configuration.
    pub(super) fn finish(self) -> Result<Config, ConfigError> {
        let values = ConfigValues::resolve(&self)?;
        let task_id = check::whole(&values, &self)?;
        Ok(Config { values, task_id, origins: self.origins() })
    }

    /// Whether a source has set the key.
    pub(super) fn has(&self, name: &str) -> bool {
        self.texts.contains_key(name)
    }

    /// Sets a key without default that no source has set.
    pub(super) fn put_default(
        &mut self,
        name: &'static str,
        text: String,
        origin: &Origin,
    ) -> Result<(), ConfigError> {
        match Key::named(name) {
            Some(key) if !self.has(name) => self.put(key, text, origin.clone()),
            _ => Ok(()),
        }
    }

    fn put(&mut self, key: &'static Key, text: String, origin: Origin) -> Result<(), ConfigError> {
        if let Err(refusal) = (key.check)(&text) {
            return Err(wrong(key, &text, origin, refusal));
        }
        self.texts.insert(key.name, (text, origin));
        Ok(())
    }

    /// Sets the values of the chosen profile, where every other source has left the default. A
    /// `poll` or `wait` that contradicts another source is left out.
    fn put_profile(&mut self) -> Result<(), ConfigError> {
        let Some(profile) = self.value("profile", OneOf::<Profile>::read)? else { return Ok(()) };
        for (key, text, origin) in file::of_profile(profile)? {
            if self.origin(key.name) == Origin::Default && !self.excludes(key.name, &text) {
                self.put(key, text, origin)?;
            }
        }
        Ok(())
    }

    /// Whether a setting can't be together with what the sources have said: see [`check::whole`].
    fn excludes(&self, name: &str, text: &str) -> bool {
        let is = |name, value: &str| self.texts.get(name).is_some_and(|(text, _)| text == value);
        match name {
            "poll" => text == "adaptive" && self.has("wait") && !is("wait", "auto"),
            "wait" => text != "auto" && is("poll", "adaptive"),
            _ => false,
        }
    }

    fn put_environment(&mut self, variables: &Variables) -> Result<(), ConfigError> {
        variables.keys().try_for_each(|name| check_variable(&name.to_string_lossy()))?;
        for key in KEYS {
            let mut said: Option<(String, String)> = None;
            for name in key.variables() {
                let Some(value) = variables.get(OsStr::new(&name)) else { continue };
                let origin = Origin::Variable { name: name.clone() };
                let text = value.clone().into_string().map_err(|raw| {
                    let why = Some(format!("it is not UTF-8; it must be {}", key.allowed));
                    wrong(key, &raw.to_string_lossy(), origin.clone(), why)
                })?;
                match &said {
                    None => self.put(key, text.clone(), origin)?,
                    Some((_, other)) if *other == text => continue,
                    Some((variable, other)) => {
                        let why =
                            format!("{variable} is {} and sets the same: unset one of them", quote(other));
                        return Err(wrong(key, &text, origin, Some(why)));
                    }
                }
                said = Some((name, text));
            }
        }
        Ok(())
    }

    /// The error for a value that contradicts another setting.
    pub fn conflict(&self, name: &'static str, why: String) -> ConfigError {
        let (text, origin) = self.texts.get(name).cloned().unwrap_or((String::new(), Origin::Default));
        ConfigError::Value { origin, key: name, value: quote(&text), why }
    }

    /// The origin of a key's value.
    pub fn origin(&self, name: &str) -> Origin {
        self.texts.get(name).map_or(Origin::Default, |(_, origin)| origin.clone())
    }

    /// The origins of all values.
    pub fn origins(&self) -> Origins {
        Origins(self.texts.iter().map(|(key, (_, origin))| (*key, origin.clone())).collect())
    }

    /// The strongest value of `key`, parsed by `read`. `None` if it is not set and has no default.
    pub fn value<T>(
        &self,
        key: &'static str,
        read: fn(&str) -> Result<T, InvalidValue>,
    ) -> Result<Option<T>, ConfigError> {
        let Some((text, _)) = self.texts.get(key) else { return Ok(None) };
        let refused = |refusal: InvalidValue| refusal.unwrap_or_else(|| "it is not allowed".to_string());
        read(text).map(Some).map_err(|refusal| self.conflict(key, refused(refusal)))
    }

    /// The error for a required key that is not set.
    pub fn missing(&self, key: &'static str) -> ConfigError {
        let call =
            if key == "cluster" { "set(\"cluster\", \"JOB=HOST:PORT,...\")" } else { "member(JOB, TASK)" };
        let variable = variable(key);
        let environment = match self.ignores_environment {
            true => format!("remove without_environment() and set the variable {variable}"),
            false => format!("set the environment variable {variable}"),
        };
        let file = match &self.file {
            Some(path) => format!("add `{key} = ...` to {}", path.display()),
            None => format!("add `{key} = ...` to a file and name it with file(PATH)"),
        };
        let meet = match key {
            "cluster" => {
                "; or have start() meet the others: set store, or MASTER_ADDR and MASTER_PORT, and use a \
                 launcher"
            }
            _ => "",
        };
        let remedy = format!("call {call} on the builder, {environment}, or {file}{meet}");
        ConfigError::Missing { key, remedy }
    }
}
