//! Charts as SVG: bars, a line or curves, with a spread, below each other on one sheet.
//!
//! Pure: the same data give the same text. Start reading at [`sheet`].

mod curves;

use std::fmt::Write;

/// A chart. The vertical axis begins at zero, except for curves.
pub(crate) struct Chart {
    pub(crate) title: String,
    /// What the vertical axis counts, with its unit.
    pub(crate) unit: String,
    /// What the horizontal axis shows; empty if the names of the marks say it.
    pub(crate) along: String,
    pub(crate) marks: Vec<Mark>,
    pub(crate) shape: Shape,
}

/// How marks are drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Each by itself.
    Bars,
    /// In the order of their places, joined.
    Line,
    /// On logarithmic axes; those with the same label are a curve, and the labels a legend.
    Curves,
}

/// A measured value.
pub(crate) struct Mark {
    /// Below the axis.
    pub(crate) name: String,
    /// Where on the axis of a line or curve; bars stand in equal distances.
    pub(crate) place: f64,
    pub(crate) value: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
    /// Beside the mark; of a curve, its name.
    pub(crate) label: String,
    pub(crate) colour: &'static str,
}

/// Pixels.
const WIDTH: f64 = 900.0;
const HEADING_HEIGHT: f64 = 64.0;
const CHART_HEIGHT: f64 = 330.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 24.0;
const ABOVE: f64 = 48.0;
const BELOW: f64 = 62.0;
/// Of one letter of a name below the axis.
const LETTER_WIDTH: f64 = 6.6;

const INK: &str = "#1f2430";
const FAINT: &str = "#d9dce3";
const MUTED: &str = "#5b6270";

/// All charts below a heading, as a whole SVG file.
pub(crate) fn sheet(heading: &[&str], charts: &[Chart]) -> String {
    let height = HEADING_HEIGHT + CHART_HEIGHT * charts.len() as f64;
    let mut svg = Svg(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"system-ui, 'DejaVu Sans', sans-serif\" font-size=\"12\">\n"
    ));
    svg.rectangle(0.0, 0.0, WIDTH, height, "#ffffff");
    for (index, line) in heading.iter().enumerate() {
        let y = 26.0 + 18.0 * index as f64;
        svg.text(LEFT, y, "start", if index == 0 { INK } else { MUTED }, line);
    }
    for (index, chart) in charts.iter().enumerate() {
        draw(&mut svg, HEADING_HEIGHT + CHART_HEIGHT * index as f64, chart);
    }
    svg.0.push_str("</svg>\n");
    svg.0
}

fn draw(svg: &mut Svg, top: f64, chart: &Chart) {
    let bottom = top + CHART_HEIGHT - BELOW;
    let _ = writeln!(svg.0, "<g font-weight=\"600\">");
    svg.text(LEFT, top + 18.0, "start", INK, &chart.title);
    let _ = writeln!(svg.0, "</g>");
    svg.text(LEFT, top + 34.0, "start", MUTED, &chart.unit);
    match chart.shape {
        Shape::Curves => curves::draw(svg, top, chart),
        Shape::Bars | Shape::Line => from_zero(svg, top, chart),
    }
    svg.line([LEFT, bottom], [WIDTH - RIGHT, bottom], INK, 1.0);
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    svg.text(middle, bottom + 44.0, "middle", MUTED, &chart.along);
}

/// Bars or a line over a vertical axis that begins at zero.
fn from_zero(svg: &mut Svg, top: f64, chart: &Chart) {
    let most = chart.marks.iter().map(|mark| mark.most.max(mark.value)).fold(0.0, f64::max);
    let step = tick(most);
    let steps = (most / step).ceil().max(1.0);
    let (plot_top, bottom) = (top + ABOVE, top + CHART_HEIGHT - BELOW);
    let y = |value: f64| bottom - value / (step * steps) * (bottom - plot_top);
    for index in 0..=steps as usize {
        let value = step * index as f64;
        svg.line([LEFT, y(value)], [WIDTH - RIGHT, y(value)], FAINT, 1.0);
        svg.text(LEFT - 8.0, y(value) + 4.0, "end", MUTED, &number(value, step));
    }
    match chart.shape {
        Shape::Bars => bars(svg, chart, bottom, y),
        _ => line(svg, chart, bottom, y),
    }
}

fn bars(svg: &mut Svg, chart: &Chart, bottom: f64, y: impl Fn(f64) -> f64) {
    let slot = (WIDTH - RIGHT - LEFT) / chart.marks.len().max(1) as f64;
    let longest = chart.marks.iter().map(|mark| mark.name.chars().count()).max().unwrap_or(0);
    let leaning = longest as f64 * LETTER_WIDTH > slot;
    for (index, mark) in chart.marks.iter().enumerate() {
        let middle = LEFT + slot * (index as f64 + 0.5);
        let width = (slot * 0.62).min(72.0);
        svg.rectangle(
            middle - width / 2.0,
            y(mark.value),
            width,
            bottom - y(mark.value),
            mark.colour,
        );
        spread(svg, mark, middle, &y);
        svg.text(middle, y(mark.most.max(mark.value)) - 6.0, "middle", INK, &mark.label);
        match leaning {
            true => svg.leaning(middle + 4.0, bottom + 14.0, INK, &mark.name),
            false => svg.text(middle, bottom + 18.0, "middle", INK, &mark.name),
        }
    }
}

fn line(svg: &mut Svg, chart: &Chart, bottom: f64, y: impl Fn(f64) -> f64) {
    let last = chart.marks.iter().map(|mark| mark.place).fold(1e-9, f64::max);
    // Room for a label on either side.
    let x = |place: f64| LEFT + 30.0 + place / last * (WIDTH - RIGHT - LEFT - 70.0);
    for pair in chart.marks.windows(2) {
        let [from, to] = [&pair[0], &pair[1]];
        svg.line([x(from.place), y(from.value)], [x(to.place), y(to.value)], to.colour, 2.0);
    }
    for mark in &chart.marks {
        let (x, height) = (x(mark.place), y(mark.value));
        spread(svg, mark, x, &y);
        let _ = writeln!(
            svg.0,
            "<circle cx=\"{x:.1}\" cy=\"{height:.1}\" r=\"4\" fill=\"{}\"/>",
            mark.colour
        );
        svg.text(x, y(mark.most.max(mark.value)) - 9.0, "middle", INK, &mark.label);
        svg.line([x, bottom], [x, bottom + 4.0], INK, 1.0);
        svg.text(x, bottom + 18.0, "middle", INK, &mark.name);
    }
}

/// From the least to the most.
fn spread(svg: &mut Svg, mark: &Mark, x: f64, y: &impl Fn(f64) -> f64) {
    svg.line([x, y(mark.least)], [x, y(mark.most)], INK, 1.2);
    for value in [mark.least, mark.most] {
        svg.line([x - 5.0, y(value)], [x + 5.0, y(value)], INK, 1.2);
    }
}

/// A round distance between the lines of an axis that reaches `most`: 1, 2 or 5 times a power of
/// ten, four to nine of them.
fn tick(most: f64) -> f64 {
    if !(most.is_finite() && most > 0.0) {
        return 1.0;
    }
    let power = 10f64.powf((most / 5.0).log10().floor());
    let step = [1.0, 2.0, 5.0].into_iter().find(|step| most / (step * power) <= 6.0);
    step.unwrap_or(10.0) * power
}

/// A value of an axis with lines every `step`.
fn number(value: f64, step: f64) -> String {
    let decimals = (-step.log10().floor()).max(0.0) as usize;
    format!("{value:.decimals$}")
}

/// A growing file.
struct Svg(String);

impl Svg {
    fn rectangle(&mut self, x: f64, y: f64, width: f64, height: f64, colour: &str) {
        let _ = writeln!(
            self.0,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" \
             fill=\"{colour}\"/>"
        );
    }

    fn line(&mut self, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2], colour: &str, width: f64) {
        let _ = writeln!(
            self.0,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" \
             stroke=\"{colour}\" stroke-width=\"{width}\"/>"
        );
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, colour: &str, text: &str) {
        let text = escaped(text);
        let _ = writeln!(
            self.0,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">\
             {text}</text>"
        );
    }

    /// A text that falls to the left below a mark.
    fn leaning(&mut self, x: f64, y: f64, colour: &str, text: &str) {
        let text = escaped(text);
        let _ = writeln!(
            self.0,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\" fill=\"{colour}\" \
             transform=\"rotate(-30 {x:.1} {y:.1})\">{text}</text>"
        );
    }
}

/// Text as XML wants it. Control characters, which no XML can hold, become spaces.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            control if control.is_control() => safe.push(' '),
            other => safe.push(other),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(shape: Shape, values: &[f64]) -> Chart {
        let mark = |(index, &value): (usize, &f64)| Mark {
            name: format!("n{index}"),
            place: index as f64,
            value,
            least: value * 0.9,
            most: value * 1.1,
            label: format!("{value:.0}"),
            colour: "#4c78a8",
        };
        Chart {
            title: "a < b & c".to_owned(),
            unit: "tok/s".to_owned(),
            along: "tokens".to_owned(),
            marks: values.iter().enumerate().map(mark).collect(),
            shape,
        }
    }

    /// Heights of the bars, in pixels; the sheet itself is left out.
    fn heights(svg: &str) -> Vec<f64> {
        let bars = svg.lines().filter(|line| line.starts_with("<rect")).skip(1);
        let height = |line: &str| {
            let (_, rest) = line.split_once("height=\"").unwrap();
            rest.split('"').next().unwrap().parse::<f64>().unwrap()
        };
        bars.map(height).collect()
    }

    #[test]
    fn bars_are_as_high_as_their_values() {
        let svg = sheet(&["heading"], &[chart(Shape::Bars, &[50.0, 100.0, 25.0])]);
        let heights = heights(&svg);
        assert!((heights[1] / heights[0] - 2.0).abs() < 0.01, "{heights:?}");
        assert!((heights[0] / heights[2] - 2.0).abs() < 0.01, "{heights:?}");
        assert!(svg.contains("a &lt; b &amp; c") && svg.contains(">tok/s<"));
    }

    #[test]
    fn every_element_is_closed() {
        let charts = [chart(Shape::Bars, &[1.0, 0.0]), chart(Shape::Line, &[3.0, 1e6])];
        for svg in [sheet(&["\u{1b}h"], &charts), sheet(&[], &[chart(Shape::Line, &[])])] {
            let mut open = Vec::new();
            for tag in svg.split('<').skip(1).map(|rest| rest.split('>').next().unwrap()) {
                let name = tag.trim_start_matches('/').split_whitespace().next().unwrap();
                match (tag.starts_with('/'), tag.ends_with('/')) {
                    (true, _) => assert_eq!(open.pop(), Some(name)),
                    (false, false) => open.push(name),
                    (false, true) => {}
                }
            }
            assert!(open.is_empty(), "{open:?}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn axes_have_few_round_lines() {
        for (most, step) in [(1.0, 0.2), (1234.0, 500.0), (950.0, 200.0), (4.9, 1.0), (60.0, 10.0)]
        {
            assert!((tick(most) - step).abs() < 1e-9, "{most}: {}", tick(most));
        }
        assert_eq!((tick(0.0), tick(f64::NAN)), (1.0, 1.0));
        assert_eq!((number(0.4, 0.2).as_str(), number(1500.0, 500.0).as_str()), ("0.4", "1500"));
    }
}
