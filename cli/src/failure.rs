//! How a command's failure reaches whoever started it: one line on standard error, and an exit
//! code. Start reading at [`report`].

use std::process::ExitCode;

use anyhow::Error;
use paceline_comm::CommError;
use paceline_runtime::RuntimeError;

use crate::output::print;

/// A mistake in the command line that its parser could not see.
#[derive(Debug)]
pub(crate) struct UsageError(pub(crate) String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// A failure of the whole group, which another rank reports on the same standard error.
#[derive(Debug)]
pub(crate) struct ToldByAnotherRank;

impl std::fmt::Display for ToldByAnotherRank {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("another rank failed")
    }
}

impl std::error::Error for ToldByAnotherRank {}

/// As the argument parser's own errors: 2 says that the command line is wrong, 1 that what it asks
/// for failed.
pub(crate) fn report(error: &Error) -> ExitCode {
    if error.is::<ToldByAnotherRank>() {
        return ExitCode::FAILURE;
    }
    print::note(format_args!("error: {}", with_causes(error)));
    if is_usage(error) { ExitCode::from(2) } else { ExitCode::FAILURE }
}

/// Whether other options would help.
fn is_usage(error: &Error) -> bool {
    error.is::<UsageError>()
        || matches!(error.downcast_ref(), Some(RuntimeError::Request { .. }))
        || error.downcast_ref().is_some_and(is_setting)
}

/// Whether an error is about what the options or the environment say.
fn is_setting(error: &CommError) -> bool {
    use CommError::{SettingContradiction, SettingInvalid, SettingMissing};
    matches!(error, SettingContradiction { .. } | SettingInvalid { .. } | SettingMissing { .. })
}

/// An error and its causes. Many errors say their causes themselves, so that what was said once is
/// left out.
fn with_causes(error: &Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text += ": ";
            text += &cause;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn each_cause_is_said_once() {
        let error = anyhow!("no such file").context("cannot read it: no such file; look there");
        assert_eq!(with_causes(&error), "cannot read it: no such file; look there");
        let error = anyhow!("disk full").context("cannot write");
        assert_eq!(with_causes(&error.context("saving")), "saving: cannot write: disk full");
    }

    #[test]
    fn usage_is_recognised_under_context() {
        let error = Error::new(UsageError("no such option".to_owned()));
        assert!(is_usage(&error) && is_usage(&error.context("line 3")));
        assert!(!is_usage(&anyhow!("no such file")));
    }
}
